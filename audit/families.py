"""The cases of the component audit: units of the main shape, small trees and sizes, adversarial and exact-grid ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from audit.cases import SPLITS, CaseSpec
from lumotree.contract import DIMS_27B, DIMS_TINY, Contract, Dims
from lumotree.errors import ContractError
from lumotree.tree_named import named

#: dk is no power of two, K != V, HV = 3 HK.
DIMS_ODD = Dims(2, 6, 60, 36, 52, 6, 2, 40, 12, name="odd")
#: dk and head_dim are powers of four, so that exact-grid outputs are exact too.
DIMS_EXACT = Dims(2, 6, 16, 20, 44, 4, 2, 64, 16, name="exact")
#: For Triton's interpreter, which costs milliseconds a program and step.
DIMS_MICRO = Dims(1, 3, 8, 12, 20, 2, 1, 16, 4, name="micro")
DIMS_MICRO_EXACT = Dims(1, 3, 16, 12, 20, 2, 1, 64, 16, name="micro-exact")
#: HV = 2 HK, no grouped attention heads, every channel rotates.
DIMS_FULL = Dims(2, 4, 12, 20, 36, 2, 2, 8, 8, name="full")
#: HV = HK, three query heads a KV head, a convolution of three taps.
DIMS_EQUAL = Dims(2, 2, 12, 20, 36, 6, 2, 24, 8, conv_width=3, name="equal")
DIMS_MICRO_FULL = Dims(2, 4, 8, 12, 20, 2, 2, 8, 8, name="micro-full")
DIMS_MICRO_EQUAL = Dims(1, 1, 8, 12, 20, 3, 1, 16, 4, conv_width=3, name="micro-equal")

#: Committed tokens of a main-shape unit: the same for all, so that units are exchangeable.
UNIT_PREFIX = 40


@dataclass(frozen=True)
class Shape:
    """A main shape: its dims, tree, and how many sets and instances a run draws."""

    name: str
    dims: Dims
    tree: str
    sets: int
    instances: int


SHAPES: dict[str, Shape] = {
    "27B": Shape("27B", DIMS_27B, "hydra27", 2, 48),
    "tiny": Shape("tiny", DIMS_TINY, "hydra27", 2, 48),
    "micro": Shape("micro", DIMS_MICRO, "binary:2", 2, 24),
}


#: Trees of a main shape's units for contracts that do not take its own: smaller ones, then a chain.
_FALLBACK_TREES = ("binary:3", "binary:2", "mtp5", "chain:2")


def fitting_shape(shape: Shape, contract: Contract) -> Shape:
    """The shape with the largest of its trees that a contract takes (`trees=False`, `max_rows`).

    Raises ContractError when it takes not even two rows.
    """
    for tree in (shape.tree, *_FALLBACK_TREES):
        candidate = replace(shape, tree=tree)
        if fits(units(candidate, "heldout", 0, sets=1, instances=1)[0], contract):
            return candidate
    raise ContractError(f"contract: expected max_rows >= 2 for a tree to audit, got max_rows={contract.max_rows}")


def units(
    shape: Shape, split: str, seed: int, *, sets: int | None = None, instances: int | None = None
) -> list[CaseSpec]:
    """Envelope units (set, instance) of a main shape: independent draws, nothing shared between splits."""
    return [
        CaseSpec(
            id=f"{shape.name}/{shape.tree}/{split}/s{s}/i{i}",
            dims=shape.dims,
            trees=(shape.tree,),
            prefixes=(UNIT_PREFIX,),
            entropy=(seed, SPLITS[split], s, i),
            page_size=16,
            unit=True,
            control=i == 0,
            set_index=s,
            instance=i,
        )
        for s in range(shape.sets if sets is None else sets)
        for i in range(shape.instances if instances is None else instances)
    ]


def _named(dims: Dims) -> Iterable[tuple[str, dict[str, object]]]:
    for tree in ("hydra27", "mtp5", "chain:9", "star:6", "comb:5", "binary:3"):
        yield (
            f"named/{tree}",
            {"dims": dims, "trees": (tree,), "prefixes": (7,), "control": tree in ("hydra27", "comb:5")},
        )


def _sizes(dims: Dims) -> Iterable[tuple[str, dict[str, object]]]:
    for n in (1, 2, 63, 64, 65):
        yield f"size/{n}", {"dims": dims, "trees": (f"random:{n}",), "prefixes": (3,), "inactive_fraction": 0.1}


def _adversarial(dims: Dims, tree: str) -> Iterable[tuple[str, dict[str, object]]]:
    for regime in ("near_one", "near_zero", "zero_keys", "tiny_keys", "large_gates"):
        yield f"regime/{regime}", {"dims": dims, "trees": (tree,), "prefixes": (5,), "regime": regime}


def _layouts(dims: Dims, trees: tuple[str, str, str]) -> Iterable[tuple[str, dict[str, object]]]:
    yield "start", {"dims": dims, "trees": (trees[1],), "prefixes": (0,)}
    yield "short-prefix", {"dims": dims, "trees": (trees[1],), "prefixes": (1,), "page_size": 16}
    yield "inplace", {"dims": dims, "trees": (trees[1],), "prefixes": (6,), "placement": "inplace"}
    yield "shuffled", {"dims": dims, "trees": (trees[0],), "prefixes": (6,), "placement": "shuffled"}
    yield (
        "batch",
        {
            "dims": replace(dims, layers=3),  # a ring of two layers must not do
            "trees": trees,
            "prefixes": (17, 2, 33),
            "page_size": 16,
            "padding": 1,
            "control": True,
        },
    )
    yield "batch-inplace", {"dims": dims, "trees": trees, "prefixes": (0, 40, 9), "placement": "inplace"}


def _exact(dims: Dims, trees: tuple[str, ...]) -> Iterable[tuple[str, dict[str, object]]]:
    for tree in trees:
        yield f"exact/{dims.name}/{tree}", {"dims": dims, "trees": (tree,), "prefixes": (9,), "regime": "exact"}


def _context(dims: Dims, long: tuple[int, ...], edges: tuple[int, ...]) -> Iterable[tuple[str, dict[str, object]]]:
    """More keys than one block of a kernel holds, prefixes at and one before a page's end, scores far below zero."""
    tree = "star:4" if len(long) > 1 else "star:3"
    yield "context/long", {"dims": dims, "trees": (tree,) * len(long), "prefixes": long, "page_size": 16}
    trees = ("star:2", "chain:3", "star:3", "chain:2")[: len(edges)]
    yield "context/page-edges", {"dims": dims, "trees": trees, "prefixes": edges, "page_size": 16}
    yield "context/page-8", {"dims": dims, "trees": ("star:3", "chain:2"), "prefixes": (16, 23), "page_size": 8}
    yield "regime/cold", {"dims": dims, "trees": ("comb:2",), "prefixes": (5,), "regime": "cold"}


def _requests(dims: Dims, two: tuple[str, str], many: tuple[str, ...]) -> Iterable[tuple[str, dict[str, object]]]:
    """Padding that is not last, more requests than a handful, slot numbers of more than three bits, a deep tree."""
    padded: dict[str, object] = {"dims": dims, "trees": two, "prefixes": (3, 6), "page_size": 16}
    yield "padding/start", {**padded, "padding": 1, "padding_at": "start"}
    yield "padding/middle", {**padded, "padding": 2, "padding_at": "middle"}
    yield "many", {"dims": dims, "trees": many, "prefixes": tuple(range(len(many))), "spare_slots": 31}
    yield "deep", {"dims": dims, "trees": ("chain:20",), "prefixes": (2,)}


def _heads(full: Dims, equal: Dims) -> Iterable[tuple[str, dict[str, object]]]:
    yield "heads/full", {"dims": full, "trees": ("comb:2",), "prefixes": (5,)}
    yield "heads/equal", {"dims": equal, "trees": ("comb:2",), "prefixes": (1,)}


def small_cases(split: str, seed: int) -> list[CaseSpec]:
    """Small trees of every named kind, odd sizes, adversarial regimes, layouts and exact-grid inputs."""
    drawn = [
        *_named(DIMS_TINY),
        *_sizes(DIMS_TINY),
        *_adversarial(DIMS_ODD, "hydra27"),
        *_layouts(DIMS_TINY, ("hydra27", "comb:5", "star:6")),
        ("odd", {"dims": DIMS_ODD, "trees": ("binary:3",), "prefixes": (11,), "control": True}),
        ("reach/tiny", {"dims": DIMS_TINY, "trees": ("chain:12",), "prefixes": (4,), "regime": "near_one"}),
        *_exact(DIMS_EXACT, ("hydra27", "comb:5", "star:6")),
        *_exact(DIMS_27B, ("hydra27",)),
        *_context(DIMS_TINY, (200, 600), (16, 31, 32, 15)),
        *_requests(DIMS_TINY, ("comb:2", "star:3"), ("star:3", "chain:3") * 4 + ("star:3",)),
        *_heads(DIMS_FULL, DIMS_EQUAL),
        ("size/130", {"dims": DIMS_TINY, "trees": ("random:130",), "prefixes": (3,), "inactive_fraction": 0.1}),
        ("regime/mid_gates", {"dims": DIMS_ODD, "trees": ("hydra27",), "prefixes": (5,), "regime": "mid_gates"}),
    ]
    return _specs("small", drawn, split, seed)


def micro_cases(split: str, seed: int) -> list[CaseSpec]:
    """The same kinds at sizes that Triton's interpreter finishes in seconds."""
    drawn = [
        *((f"named/{t}", {"dims": DIMS_MICRO, "trees": (t,), "prefixes": (5,)}) for t in ("mtp5", "star:4", "comb:3")),
        ("size/1", {"dims": DIMS_MICRO, "trees": ("chain:1",), "prefixes": (3,)}),
        (
            "size/9",
            {"dims": DIMS_MICRO, "trees": ("random:9",), "prefixes": (3,), "inactive_fraction": 0.3, "control": True},
        ),
        ("odd", {"dims": Dims(1, 3, 60, 20, 20, 2, 1, 16, 4, name="odd"), "trees": ("comb:3",), "prefixes": (4,)}),
        *_adversarial(DIMS_MICRO, "comb:3"),
        *_layouts(DIMS_MICRO, ("comb:3", "star:4", "chain:3")),
        *_exact(DIMS_MICRO_EXACT, ("comb:3",)),
        *_context(DIMS_MICRO, (200,), (16, 31)),
        *_requests(DIMS_MICRO, ("chain:2", "star:3"), ("chain:2",) * 6),
        *_heads(DIMS_MICRO_FULL, DIMS_MICRO_EQUAL),
        ("regime/mid_gates", {"dims": DIMS_MICRO, "trees": ("comb:3",), "prefixes": (5,), "regime": "mid_gates"}),
    ]
    return _specs("micro", drawn, split, seed)


def _specs(family: str, drawn: Iterable[tuple[str, dict[str, object]]], split: str, seed: int) -> list[CaseSpec]:
    """Every second case gives the backend a workspace larger than the batch."""
    return [
        CaseSpec(
            id=f"{family}/{split}/{name}",
            entropy=(seed, SPLITS[split], 1000 + i),
            slack=3 if i % 2 else 0,
            **fields,  # type: ignore[arg-type]
        )
        for i, (name, fields) in enumerate(drawn)
    ]


def fits(spec: CaseSpec, contract: Contract) -> bool:
    """Whether a backend with this contract can be asked to run a case: trees where it takes them, no tree too large."""
    chains = all(t.startswith(("chain:", "mtp")) for t in spec.trees)
    largest = max(max(_rows(t), spec.pad_rows) for t in spec.trees)
    return (contract.trees or chains) and largest <= contract.max_rows


def _rows(tree: str) -> int:
    kind, _, size = tree.partition(":")
    return int(size) if kind == "random" else named(tree).n


def family(
    shape: Shape, split: str, seed: int, sets: int | None = None, instances: int | None = None
) -> list[CaseSpec]:
    """Every case of a run: units first, then the small ones that go with the shape."""
    few = micro_cases if shape.name == "micro" else small_cases
    return [*units(shape, split, seed, sets=sets, instances=instances), *few(split, seed)]


def replayed_cases(shape: Shape, split: str, seed: int) -> list[CaseSpec]:
    """Cases of one size: captured graphs are replayed with other trees, slots, prefixes and accepted lengths.

    Batches of three requests of 32 physical rows each, trees drawn at random or named, padded with inactive rows.
    """
    trees = [("hydra27", "comb:5", "star:6"), *[("random:32", f"random:{8 + 3 * i}", "random:21") for i in range(5)]]
    return [
        CaseSpec(
            id=f"replay/{split}/{i}",
            dims=replace(shape.dims, layers=2),
            trees=names,
            prefixes=(17 + 5 * i, 64 - 7 * i, 3 + i),
            entropy=(seed, SPLITS[split], 3000 + i),
            page_size=16,
            pad_rows=32,
            inactive_fraction=0.2,
            control=False,
        )
        for i, names in enumerate(trees)
    ]
