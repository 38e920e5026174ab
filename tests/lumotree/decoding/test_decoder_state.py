"""Slots, prefixes, saved requests, forced paths; and everything that is refused, with nothing half-done."""

import copy
from dataclasses import replace

import pytest
import torch
from decoding_drafters import GuessDrafter, random_shapes
from decoding_toy import HIDDEN, VOCAB, prompts, stack

from lumotree.backends.batch import build_batch
from lumotree.backends.mixed import MixedBackend
from lumotree.backends.protocol import BackendBase
from lumotree.backends.torch_backend import TorchBackend
from lumotree.cycle import Decoder
from lumotree.decide import Decision
from lumotree.draft_types import Proposal
from lumotree.errors import BackendError, CapacityError, DecodeError, PathError, RequestError, TreeError
from lumotree.model_types import Forward
from lumotree.plain import PAGE_SIZE, PlainDecoder, one_row_batch
from lumotree.proposals import fitted
from lumotree.requests import Request
from lumotree.sampling import SamplingParams
from lumotree.slots import Capacity, Slots
from lumotree.tree import Tree
from lumotree.tree_named import chain, hydra27

PROMPT = prompts(1, 9)[0]
SAMPLED = SamplingParams(temperature=1.0)


def decoder(slots=2, context=64, **kwargs):
    return Decoder(stack(TorchBackend()), Capacity(slots, context, **kwargs))


def finish(machine):
    while any(s.finished is None for s in machine.running.values()):
        machine.cycle()
    return machine


def solo(request):
    machine = decoder(1)
    machine.admit(request)
    finish(machine)
    return tuple(machine.running[request.number].output), machine.surfaces(request.number)


def everything(machine):
    """All bits a refused call could have changed."""
    tensors = {**machine.pools.tensors(), "dk": machine.draft_cache.k, "dv": machine.draft_cache.v}
    return {name: t.clone() for name, t in tensors.items()}, copy.deepcopy(
        (machine.slots.free_pages, machine.slots.free_slots, sorted(machine.running), len(machine.prefixes))
    )


def assert_untouched(machine, before):
    tensors, counts = everything(machine)
    assert counts == before[1]
    assert all(torch.equal(t, before[0][name]) for name, t in tensors.items())


# What is refused


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": ()}, "empty prompt"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"seed": -1}, "seed=-1"),
        ({"chunk": 0}, "chunk=0"),
        ({"rule": "best"}, "rule='best'"),
    ],
)
def test_a_request_that_cannot_be_is_refused(fields, message):
    with pytest.raises(RequestError, match=message):
        Request(**{"number": 1, "prompt": (1, 2), "max_tokens": 3} | fields)


class NeedsHead(GuessDrafter):
    needs_head = True


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": (1, VOCAB)}, f"token {VOCAB} at position 1 is outside the vocabulary; allowed: 0..{VOCAB - 1}"),
        ({"prompt": (1, -1)}, "token -1 at position 1"),
        ({"eos": VOCAB}, "eos: token"),
        ({"max_tokens": 64}, "need 65 positions; the cache holds context=64"),
        ({"number": 0}, "already running"),
    ],
)
def test_a_request_that_does_not_fit_is_refused_with_nothing_written(fields, message):
    machine = decoder()
    machine.admit(Request(0, PROMPT, 4))
    machine.cycle()
    before = everything(machine)
    with pytest.raises(RequestError, match=message):
        machine.admit(replace(Request(1, (1, 2), 3), **fields))
    assert_untouched(machine, before)


def test_a_drafter_that_needs_a_head_needs_one():
    machine = Decoder(stack(TorchBackend(), head=False), Capacity(1, 64))
    with pytest.raises(RequestError, match="needs a draft head; this model has none"):
        machine.admit(Request(1, (1, 2), 3, drafter=NeedsHead(lambda r: chain(2), VOCAB)))


def test_a_full_cache_refuses_until_a_request_ends():
    machine = decoder(slots=3, pages=4)
    machine.admit(Request(0, PROMPT, 40))
    machine.cycle()
    before = everything(machine)
    with pytest.raises(CapacityError, match="2 pages of 16 tokens are needed, 1 of 4 are free"):
        machine.admit(Request(1, PROMPT, 20))
    assert_untouched(machine, before)
    finish(machine).release(0)
    assert machine.admit(Request(1, PROMPT, 20)).lease.pages == (0, 1)


def test_no_free_slot_is_refused():
    machine = decoder(slots=1, pages=9)
    machine.admit(Request(0, PROMPT, 4))
    with pytest.raises(CapacityError, match="all 1 state slots are in use"):
        machine.admit(Request(1, PROMPT, 4))


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"slots": 0}, "slots=0"), ({"page_size": -1}, "page_size=-1"), ({"pages": 3}, "the 4 pages of one request")],
)
def test_a_capacity_that_cannot_be_is_refused(fields, message):
    with pytest.raises(RequestError, match=message):
        Capacity(**{"slots": 1, "context": 64} | fields)


def test_an_unknown_request_is_named():
    machine = decoder()
    for call in (machine.release, machine.surfaces, machine.remember, machine.save):
        with pytest.raises(RequestError, match="request 5: not running; known: none"):
            call(5)
    machine.admit(Request(0, PROMPT, 4))
    with pytest.raises(RequestError, match="nothing is committed yet"):
        machine.remember(0)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (chain(40, tokens=[3] * 40), "has 40 rows; allowed: at most 32"),
        (chain(2, tokens=[4, 1]), "expected the pending token 3 in row 0, got token=4"),
        (chain(2, tokens=[3, VOCAB]), "token"),
    ],
)
def test_a_proposal_that_does_not_fit_is_refused(tree, message):
    import numpy as np

    with pytest.raises(TreeError, match=message):
        fitted(Proposal(tree), np.array([1, 3]), 1, 9, np.arange(tree.n), Capacity(1, 64), VOCAB)


def test_a_proposal_deeper_than_what_is_left_loses_its_deep_rows():
    import numpy as np

    tree = hydra27(tokens=[3] * 32)
    placed = fitted(Proposal(tree), np.array([1, 3]), 1, 2, np.arange(32), Capacity(1, 64), VOCAB).tree
    assert placed.max_depth == 2
    assert placed.active_rows == tuple(r for r in tree.active_rows if tree.depth[r] <= 2)


class Nans:
    """A model whose logits are NaN."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def verify(self, *args):
        forward = self.inner.verify(*args)
        return Forward(torch.full_like(forward.logits, torch.nan), forward.hidden)

    def step(self, *args):
        forward = self.inner.step(*args)
        return Forward(torch.full_like(forward.logits, torch.nan), forward.hidden)


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0), SAMPLED], ids=["greedy", "sampled"])
def test_logits_that_are_none_stop_the_cycle_before_anything_is_published(sampling):
    good = stack(TorchBackend(), head=False)
    request = Request(3, PROMPT, 4, sampling)
    machine = Decoder(replace(good, model=Nans(good.model)), Capacity(1, 64))
    state = machine.admit(request)
    with pytest.raises(DecodeError, match="request 3, cycle 0"):
        machine.cycle()
    assert (state.committed, state.output) == (0, [])
    with pytest.raises(DecodeError, match="request 3, token 0"):
        PlainDecoder(replace(good, model=Nans(good.model)), [request], [None]).run()


def test_plain_decoding_refuses_tokens_it_cannot_follow():
    with pytest.raises(RequestError, match="outside the vocabulary"):
        PlainDecoder(stack(TorchBackend()), [Request(0, PROMPT, 4)], [[VOCAB]])
    with pytest.raises(RequestError, match="at least one token"):
        PlainDecoder(stack(TorchBackend()), [Request(0, PROMPT, 4)], [[]])


def test_plain_decoding_says_where_a_greedy_output_is_not_its_own():
    request = Request(0, PROMPT, 6)
    (free,) = PlainDecoder(stack(TorchBackend()), [request], [None]).run()
    wrong = list(free.output)
    wrong[3] = (wrong[3] + 1) % VOCAB
    (followed,) = PlainDecoder(stack(TorchBackend()), [request], [wrong]).run()
    assert followed.differs[0] == (3, free.output[3])
    (own,) = PlainDecoder(stack(TorchBackend()), [request], [free.output]).run()
    assert own.differs == ()
    assert own.surfaces.differences(free.surfaces) == []


def test_a_mixed_backend_needs_the_surfaces_it_is_named_for():
    class OnlyGdn(BackendBase):
        name = "only-gdn"
        gdn_verify = gdn_publish = native_step = staticmethod(lambda *a: None)

    MixedBackend(OnlyGdn(), TorchBackend(), TorchBackend())
    with pytest.raises(BackendError, match="expected conv_verify in the conv backend only-gdn"):
        MixedBackend(TorchBackend(), OnlyGdn(), TorchBackend())


# Batches of one row


def test_one_row_batches_are_what_trees_of_one_row_make():
    import numpy as np

    table = np.arange(12).reshape(3, 4)
    prefix, slots = np.array([0, 17, 40]), np.array([0, 2, 1])
    flat = table[np.arange(3), prefix // PAGE_SIZE] * PAGE_SIZE + prefix % PAGE_SIZE
    quick = one_row_batch(slots, prefix, table, PAGE_SIZE, flat, torch.device("cpu"))
    trees = [Tree.make([-1], slots=[int(f)], prefix_len=int(p)) for f, p in zip(flat, prefix, strict=True)]
    slow = build_batch(trees, state_slots=slots.tolist(), page_table=torch.from_numpy(table), page_size=PAGE_SIZE)
    for made, wanted in ((quick, slow), (quick.plan, slow.plan)):
        for name, value in vars(wanted).items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(getattr(made, name), value), name
                assert getattr(made, name).dtype == value.dtype


# Slots and prefixes


def test_slots_go_round_and_a_reused_slot_starts_from_nothing():
    machine = decoder(slots=1)
    first, second = Request(0, PROMPT, 9), Request(1, PROMPT[:4], 7)
    machine.admit(first)
    finish(machine).release(0)
    machine.admit(second)
    finish(machine)
    output, surfaces = solo(second)
    assert tuple(machine.running[1].output) == output
    assert machine.surfaces(1).differences(surfaces) == []


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 33])
def test_a_shared_prefix_is_read_by_many_and_written_by_none(length):
    base = prompts(1, length)[0]
    machine = decoder(slots=3, context=96)
    donor = machine.admit(Request(0, base, 8))
    machine.cycle()
    while donor.prefilling:
        machine.cycle()
    machine.remember(0)
    shared = (length - 1) // 16
    followers = [Request(n, (*base, n, n + 1), 8) for n in (1, 2)]
    for request in followers:
        state = machine.admit(request)
        assert state.committed == length
        assert state.lease.pages[:shared] == donor.lease.pages[:shared]
        assert not set(state.lease.pages[shared:]) & set(donor.lease.pages)
    held = slice(0, shared * 16)
    flat = donor.lease.flat(0, max(shared * 16, 1))[held]
    before = [t[:, flat].clone() for t in (machine.pools.cache.k, machine.draft_cache.k)]
    finish(machine)
    for tensor, kept in zip((machine.pools.cache.k, machine.draft_cache.k), before, strict=True):
        assert torch.equal(tensor[:, flat], kept)
    for request in (Request(0, base, 8), *followers):
        output, surfaces = solo(request)
        assert tuple(machine.running[request.number].output) == output
        assert machine.surfaces(request.number).differences(surfaces) == []


def test_the_longest_stored_prefix_is_taken_and_a_whole_prompt_is_not_one():
    machine = decoder(slots=2, context=64)
    machine.admit(Request(0, PROMPT[:4], 1))
    machine.cycle()
    machine.remember(0)
    machine.release(0)
    machine.admit(Request(0, PROMPT[:7], 1))
    machine.cycle()
    machine.remember(0)
    machine.release(0)
    assert machine.admit(Request(1, PROMPT, 4)).committed == 7
    assert machine.admit(Request(2, PROMPT[:7], 4)).committed == 4  # its last token must be fed


def test_stored_prefixes_give_way_to_requests_oldest_first():
    machine = decoder(slots=1, context=64, pages=4)
    texts = [prompts(1, 33, seed=s)[0] for s in (1, 2)]
    for text in texts[:1]:
        machine.admit(Request(0, text, 1))
        while machine.running[0].finished is None:
            machine.cycle()
        machine.remember(0)
        machine.release(0)
    assert (len(machine.prefixes), machine.slots.free_pages) == (1, 2)
    machine.admit(Request(1, texts[1], 10))
    assert (len(machine.prefixes), machine.slots.free_pages) == (0, 1)
    _, surfaces = solo(Request(1, texts[1], 10))
    finish(machine)
    assert machine.surfaces(1).differences(surfaces) == []


def test_a_stored_prefix_is_kept_when_dropping_it_would_not_help():
    machine = decoder(slots=2, context=64, pages=4)
    machine.admit(Request(0, prompts(1, 33, seed=1)[0], 1))
    finish(machine)
    machine.remember(0)
    before = everything(machine)
    with pytest.raises(CapacityError, match="4 pages of 16 tokens are needed, 1 of 4 are free"):
        machine.admit(Request(1, prompts(1, 33, seed=2)[0], 30))
    assert_untouched(machine, before)


def test_pages_are_counted():
    slots = Slots(Capacity(2, 64, pages=5))
    lease = slots.lease(40)
    slots.share(lease.pages[:2])
    slots.release(lease)
    assert (slots.free_pages, slots.free_slots) == (3, 2)
    slots.drop(lease.pages[:2])
    assert slots.free_pages == 5


# Saved requests


@pytest.mark.parametrize("cycles", [1, 2, 5])
def test_a_saved_request_goes_on_elsewhere_as_if_it_had_stayed(cycles):
    drafter = GuessDrafter(random_shapes(3, 9), VOCAB, hit=0)
    request = Request(4, PROMPT, 20, SAMPLED, drafter, seed=2, chunk=5)
    machine = decoder()
    machine.admit(request)
    for _ in range(cycles):
        machine.cycle()
    saved = machine.save(4)
    other = decoder(slots=3, page_size=4)
    other.admit(Request(0, PROMPT[:3], 20))
    other.cycle()
    other.restore(saved)
    assert other.surfaces(4).differences(saved.surfaces) == []
    output, surfaces = solo(request)
    for m in (machine, other):
        finish(m)
        assert tuple(m.running[4].output) == output
        assert m.surfaces(4).differences(surfaces) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: replace(s, identity="toy 1"), "expected a state of the model 'toy 0', got one of 'toy 1'"),
        (lambda s: replace(s, tokens=s.tokens[:-1]), "another length"),
        (lambda s: replace(s, tokens=(s.tokens[0] + 1, *s.tokens[1:])), "do not begin with its prompt"),
        (lambda s: replace(s, surfaces=replace(s.surfaces, k=s.surfaces.k[:, 1:])), "expected k of shape"),
        (lambda s: replace(s, surfaces=replace(s.surfaces, recurrent=s.surfaces.recurrent[1:])), "expected recurrent"),
        (lambda s: replace(s, surfaces=replace(s.surfaces, conv=s.surfaces.conv[..., 1:])), "expected conv of shape"),
        (lambda s: replace(s, surfaces=replace(s.surfaces, draft_v=None)), "expected draft_v"),
        (lambda s: replace(s, surfaces=replace(s.surfaces, hidden=None)), rf"expected hidden of shape \[{HIDDEN}\]"),
    ],
)
def test_a_saved_request_that_does_not_fit_is_refused_with_nothing_written(change, message):
    machine = decoder()
    machine.admit(Request(4, PROMPT, 20))
    for _ in range(3):
        machine.cycle()
    saved = machine.save(4)
    machine.release(4)
    before = everything(machine)
    with pytest.raises(RequestError, match=message):
        machine.restore(change(saved))
    assert_untouched(machine, before)
    machine.restore(saved)


# Phases on their own


def test_forced_paths_are_published_as_plain_decoding_of_their_tokens():
    drafter = GuessDrafter(lambda r: hydra27(), VOCAB, hit=0)
    machine = decoder()
    requests = [Request(n, PROMPT[: 5 + n], 30, drafter=drafter) for n in (0, 1)]
    for request in requests:
        machine.admit(request)
    machine.cycle()
    for ends in ((30, 17), (3, 0)):
        verified = machine.verify(machine.propose())
        forced = [Decision(t.tree.path(end), 5) for t, end in zip(verified.turns, ends, strict=True)]
        machine.publish(verified, forced)
    outputs = [machine.running[r.number].output for r in requests]
    results = PlainDecoder(stack(TorchBackend()), requests, outputs).run()
    for request, result in zip(requests, results, strict=True):
        assert machine.surfaces(request.number).differences(result.surfaces) == []


def test_a_forced_path_that_is_none_changes_nothing():
    machine = decoder()
    machine.admit(Request(0, PROMPT, 30, drafter=GuessDrafter(lambda r: hydra27(), VOCAB)))
    machine.cycle()
    verified = machine.verify(machine.propose())
    before = everything(machine)
    with pytest.raises(PathError, match="not parent-linked"):
        machine.publish(verified, [Decision((0, 4), 1)])
    assert_untouched(machine, before)


def test_verification_and_selection_change_no_committed_bit():
    machine = decoder()
    machine.admit(Request(0, PROMPT, 30, drafter=GuessDrafter(lambda r: hydra27(), VOCAB)))
    machine.cycle()
    before = machine.surfaces(0)
    first = machine.select(machine.verify(machine.propose()))
    assert machine.surfaces(0).differences(before) == []
    assert machine.select(machine.verify(machine.propose())) == first


def test_a_cycle_without_requests_is_empty():
    assert decoder().cycle().records == ()
