"""The cycle against plain decoding: tokens, and every surface bit by bit."""

from dataclasses import replace

import pytest
import torch
from decoding_drafters import GuessDrafter, random_shapes
from decoding_toy import VOCAB, prompts, stack
from hypothesis import given, settings
from hypothesis import strategies as st

from lumotree.backends.mixed import MixedBackend
from lumotree.backends.reference import ReferenceBackend
from lumotree.backends.torch_backend import TorchBackend
from lumotree.cycle import Decoder
from lumotree.plain import PlainDecoder
from lumotree.requests import Finish, Request
from lumotree.sampling import SamplingParams
from lumotree.slots import Capacity
from lumotree.tree_named import chain, hydra27, mtp5

PROMPTS = prompts(4, 5)
SAMPLED = SamplingParams(temperature=0.8, top_k=12, repetition=1.1, presence=2.0)
FREE = SamplingParams(temperature=0.8, top_k=12)


def plain(requests, backend=None, outputs=None, **kwargs):
    """Plain decoding of all of them, following `outputs` where given."""
    return PlainDecoder(stack(backend or TorchBackend(), **kwargs), requests, outputs or [None] * len(requests)).run()


def future_of(requests, results):
    return {r.number: [*r.prompt, *p.output] for r, p in zip(requests, results, strict=True)}


def finish(decoder, order=lambda numbers: numbers):
    """Cycle until every request is done; returns number -> (output, surfaces), taken when it ends."""
    ended = {}
    while live := [n for n, s in decoder.running.items() if s.finished is None]:
        for record in decoder.cycle(order(live)).records:
            if record.finished is not None:
                ended[record.number] = (tuple(decoder.running[record.number].output), decoder.surfaces(record.number))
    return ended


def run(requests, capacity=None, backend=None, **kwargs):
    decoder = Decoder(stack(backend or TorchBackend(), **kwargs), capacity or Capacity(len(requests), 120))
    for request in requests:
        decoder.admit(request)
    return finish(decoder)


def assert_same(ended, requests, results):
    for request, result in zip(requests, results, strict=True):
        output, surfaces = ended[request.number]
        assert output == result.output
        assert surfaces.differences(result.surfaces) == []


SHAPES = {
    "root": lambda r: chain(1),
    "mtp5": lambda r: mtp5(),
    "hydra27": lambda r: hydra27(),
    "random": random_shapes(3, 20),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_trees_leave_what_plain_decoding_leaves(shape):
    requests = [Request(i, p, 24) for i, p in enumerate(PROMPTS)]
    results = plain(requests)
    assert len({r.output for r in results}) > 1
    drafter = GuessDrafter(SHAPES[shape], VOCAB, future_of(requests, results))
    assert_same(run([replace(r, drafter=drafter) for r in requests]), requests, results)


def test_2000_tokens_of_tree_decoding_are_plain_decoding_bit_by_bit():
    small = {"kinds": ("gdn", "attention"), "seed": 1}
    request = Request(7, PROMPTS[0], 2000)
    (result,) = plain([request], **small)
    drafter = GuessDrafter(random_shapes(9, 14), VOCAB, future_of([request], [result]), hit=0.97)
    ended = run([replace(request, drafter=drafter)], Capacity(1, 2010), **small)
    assert len(result.output) == 2000
    assert len(set(result.output)) > 8
    assert_same(ended, [request], [result])


def test_the_comparison_sees_one_bit():
    request = Request(0, PROMPTS[0], 6)
    (result,) = plain([request])
    _, surfaces = run([request])[0]
    for part in ("recurrent", "conv", "k", "v", "draft_k", "draft_v", "hidden"):
        tensor = getattr(surfaces, part).clone()
        integers = tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)
        integers.view(-1)[-1] ^= 1
        found = replace(surfaces, **{part: tensor}).differences(result.surfaces)
        assert [(d.part, d.elements) for d in found] == [(part, 1)]
    assert replace(surfaces, hidden=None).differences(result.surfaces)[0].surface == "D"


@pytest.mark.parametrize("laws", [False, True], ids=["point masses", "drawn"])
@pytest.mark.parametrize("rule", ["multi-round", "naive", "traversal"])
def test_sampled_trees_leave_what_plain_decoding_of_their_output_leaves(rule, laws):
    shape = random_shapes(5, 10)
    drafter = GuessDrafter(shape, VOCAB, hit=0, laws=laws)
    params = SAMPLED if laws else FREE
    requests = [Request(i, p, 16, params, drafter, rule, seed=11) for i, p in enumerate(PROMPTS[:2])]
    ended = run(requests)
    results = plain(requests, outputs=[ended[r.number][0] for r in requests])
    assert_same(ended, requests, results)


@pytest.mark.parametrize("params", [SAMPLED, FREE], ids=["penalties", "none"])
def test_zero_drafts_draw_the_tokens_of_plain_sampling(params):
    requests = [Request(i, p, 20, params, seed=3) for i, p in enumerate(PROMPTS[:3])]
    results = plain(requests)
    assert len({r.output for r in results}) == 3
    assert_same(run(requests), requests, results)


def mixed_requests():
    """Four requests with different trees, lengths, rules and parameters."""
    greedy = [Request(i, p, 12 + 5 * i) for i, p in enumerate(PROMPTS)]
    known = future_of(greedy, plain(greedy))
    drafters = [GuessDrafter(SHAPES[s], VOCAB, known) for s in ("hydra27", "random", "mtp5")]
    return [
        replace(greedy[0], drafter=drafters[0]),
        replace(greedy[1], drafter=drafters[1], sampling=SAMPLED, seed=5),
        replace(greedy[2], drafter=drafters[2], chunk=3),
        replace(greedy[3], sampling=FREE, seed=5, chunk=4),
    ]


def test_a_batch_of_four_is_four_solo_runs_bit_by_bit():
    requests = mixed_requests()
    together = run(requests)
    assert len({len(output) for output, _ in together.values()}) == 4
    for request in requests:
        alone = run([request])
        assert together[request.number][0] == alone[request.number][0]
        assert together[request.number][1].differences(alone[request.number][1]) == []


def test_sampling_follows_its_seed_and_nothing_else():
    request = mixed_requests()[1]
    alone = run([request])[request.number][0]
    assert run([request])[request.number][0] == alone
    assert run([request], Capacity(3, 200, page_size=4))[request.number][0] == alone
    assert run([replace(request, seed=6)])[request.number][0] != alone


@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_any_schedule_of_admissions_chunks_and_shapes_gives_the_solo_run(data):
    seed = data.draw(st.integers(0, 5))
    requests = []
    for number in range(3):
        shape = data.draw(st.sampled_from(sorted(SHAPES)))
        drafter = data.draw(st.sampled_from([None, GuessDrafter(SHAPES[shape], VOCAB, hit=0)]))
        sampling = data.draw(st.sampled_from([SAMPLED, FREE, SamplingParams(temperature=0)]))
        chunk = data.draw(st.sampled_from([None, 1, 3]))
        requests.append(Request(number, PROMPTS[number], data.draw(st.integers(1, 8)), sampling, drafter,
                                seed=seed, chunk=chunk))  # fmt: skip
    decoder = Decoder(stack(TorchBackend()), Capacity(2, 40, page_size=4))
    waiting, ended = list(requests), {}
    while waiting or any(s.finished is None for s in decoder.running.values()):
        if waiting and decoder.slots.free_slots and (not decoder.running or data.draw(st.booleans())):
            decoder.admit(waiting.pop(0))
        live = [n for n, s in decoder.running.items() if s.finished is None]
        for record in decoder.cycle(data.draw(st.permutations(live))).records:
            if record.finished is not None:
                ended[record.number] = (tuple(decoder.running[record.number].output), decoder.surfaces(record.number))
                decoder.release(record.number)
    assert decoder.slots.free_pages == decoder.capacity.pages
    results = plain(requests, outputs=[ended[r.number][0] for r in requests])
    assert_same(ended, requests, results)
    for request in requests:
        assert run([request])[request.number][0] == ended[request.number][0]


BACKENDS = {
    "reference": ReferenceBackend,
    "gdn torch, conv reference, attention torch": lambda: MixedBackend(
        TorchBackend(), ReferenceBackend(), TorchBackend()
    ),
    "gdn reference, conv torch, attention reference": lambda: MixedBackend(
        ReferenceBackend(), TorchBackend(), ReferenceBackend()
    ),
}


@pytest.mark.parametrize("name", BACKENDS)
def test_any_backend_serves_any_surface(name):
    requests = [Request(i, p, 10) for i, p in enumerate(PROMPTS[:2])]
    results = plain(requests, BACKENDS[name]())
    drafter = GuessDrafter(SHAPES["random"], VOCAB, future_of(requests, results))
    assert_same(run([replace(r, drafter=drafter) for r in requests], backend=BACKENDS[name]()), requests, results)


def test_end_of_sequence_inside_a_path_cuts_it():
    long = Request(0, PROMPTS[1], 30)
    (uncut,) = plain([long])
    at = next(i for i, t in enumerate(uncut.output) if i > 2 and t not in uncut.output[:i])
    request = replace(long, eos=uncut.output[at])
    (result,) = plain([request])
    assert result.output == uncut.output[: at + 1]
    drafter = GuessDrafter(lambda r: chain(30), VOCAB, future_of([long], [uncut]), hit=1)
    decoder = Decoder(stack(TorchBackend()), Capacity(1, 120))
    state = decoder.admit(replace(request, drafter=drafter))
    assert_same(finish(decoder), [request], [result])
    assert state.finished is Finish.EOS
    assert state.paths == [at]  # root and at - 1 accepted drafts; the end itself is pending


@pytest.mark.parametrize("budget", [1, 2, 5])
def test_a_token_budget_cuts_a_path(budget):
    (uncut,) = plain([Request(0, PROMPTS[0], 12)])
    request = Request(0, PROMPTS[0], budget)
    drafter = GuessDrafter(lambda r: chain(9), VOCAB, {0: [*PROMPTS[0], *uncut.output]}, hit=1)
    ended = run([replace(request, drafter=drafter)])
    assert ended[0][0] == uncut.output[:budget]
    assert_same(ended, [request], plain([request]))


def test_without_a_draft_head_there_is_no_drafter_surface():
    request = Request(0, PROMPTS[0], 5)
    ended = run([request], head=False)
    assert_same(ended, [request], plain([request], head=False))
    assert ended[0][1].hidden is None
    assert {p[0] for p in ended[0][1].parts()} == {"R", "C", "K"}
