"""``python -m magi_attention plan``: balance and bytes per rank of a mask, and a picture of it coloured by rank.

Plans exactly as a key would, through the same functions; needs neither a device nor a process group.
"""

import argparse
import ast
import inspect
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from magi_core.mask import Mask
    from magi_core.planner import DistPlan

    from ..config import DistAttnConfig

BUILDERS = ("full", "documents", "causal", "window", "prefix_lm", "block_causal", "prefix_tree")
_ITEM_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}


class ArgumentProblem(Exception):
    """What is wrong with an argument, in words for whoever typed it."""


def _literal(text: str) -> Any:
    """A Python literal, or the text itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _parameters(pairs: list[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name.isidentifier():
            raise ArgumentProblem(f"a parameter must be NAME=VALUE, e.g. -p total_q=4096, got {pair!r}")
        if name in values:
            raise ArgumentProblem(f"parameter {name} must be given once")
        values[name] = _literal(text)
    return values


def _built_mask(name: str, parameters: dict[str, Any]) -> "Mask":
    from magi_core.mask import Mask

    builder = getattr(Mask, name)
    signature = inspect.signature(builder)
    try:
        signature.bind(**parameters)
    except TypeError as error:
        plain = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
        shown = signature.replace(parameters=plain, return_annotation=inspect.Signature.empty)
        raise ArgumentProblem(f"{name}{shown}: {error}") from None
    try:
        mask: Mask = builder(**parameters)
    except (ValueError, TypeError) as error:
        raise ArgumentProblem(f"{name}: {error}") from None
    return mask


def _sliced_mask(path: str) -> "Mask":
    from magi_core.mask import Mask

    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text()
    except OSError as error:
        raise ArgumentProblem(f"--slices {path}: {error.strerror or error}") from None
    try:
        spec = json.loads(text)
    except json.JSONDecodeError as error:
        raise ArgumentProblem(f"--slices {path}: not JSON: {error}") from None
    if isinstance(spec, list):
        spec = {"slices": spec}
    if not isinstance(spec, dict):
        raise ArgumentProblem(f"--slices {path}: must hold an object or a list, got {type(spec).__name__}")
    known = {"slices", "q_ranges", "k_ranges", "mask_types", "total_q", "total_k"}
    if set(spec) - known:
        raise ArgumentProblem(
            f"--slices {path}: unknown field {sorted(set(spec) - known)[0]!r}; known: {sorted(known)}"
        )
    if "slices" in spec:
        rows = spec["slices"]
        if not isinstance(rows, list) or any(not isinstance(row, list) or len(row) not in (4, 5) for row in rows):
            raise ArgumentProblem(
                f"--slices {path}: every slice must be [q_start, q_end, k_start, k_end] or the same with a mask type"
            )
        q_ranges, k_ranges = [row[:2] for row in rows], [row[2:4] for row in rows]
        types = [row[4] if len(row) == 5 else "full" for row in rows]
    else:
        if "q_ranges" not in spec or "k_ranges" not in spec:
            raise ArgumentProblem(f"--slices {path}: must have slices, or q_ranges and k_ranges")
        q_ranges, k_ranges = spec["q_ranges"], spec["k_ranges"]
        types = spec.get("mask_types", "full")
        types = [types] * len(q_ranges) if isinstance(types, (str, int)) else types
    try:
        total_q = spec.get("total_q", max((end for _, end in q_ranges), default=0))
        total_k = spec.get("total_k", max((end for _, end in k_ranges), default=0))
        return Mask.from_slices(q_ranges, k_ranges, types, total_q=total_q, total_k=total_k)
    except (ValueError, TypeError) as error:
        raise ArgumentProblem(f"--slices {path}: {error}") from None


def _integers(text: str, option: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ArgumentProblem(f"{option} must be integers with commas between, got {text!r}") from None


def _packed_mask(args: argparse.Namespace) -> "Mask":
    from magi_core.mask import Mask

    from ..api.functools import infer_attn_mask_from_cu_seqlens

    cu_q = _integers(args.cu_seqlens, "--cu-seqlens")
    cu_k = _integers(args.cu_seqlens_k, "--cu-seqlens-k") if args.cu_seqlens_k else cu_q
    window = _integers(args.window, "--window") if args.window else [-1, -1]
    if len(window) != 2:
        raise ArgumentProblem(f"--window must be LEFT,RIGHT, got {args.window!r}")
    try:
        q, k, types, total_q, total_k = infer_attn_mask_from_cu_seqlens(cu_q, cu_k, args.causal, (window[0], window[1]))
        return Mask.from_slices(q, k, types, total_q=total_q, total_k=total_k)
    except (ValueError, TypeError) as error:
        raise ArgumentProblem(str(error)) from None


def _mask(args: argparse.Namespace) -> "Mask":
    sources = [name for name in ("mask", "slices", "cu_seqlens") if getattr(args, name) is not None]
    if len(sources) != 1:
        raise ArgumentProblem(
            f"exactly one mask must be given: a builder's name ({', '.join(BUILDERS)}), --slices or --cu-seqlens; "
            f"got {' and '.join(sources) or 'none'}"
        )
    if sources != ["mask"] and args.param:
        raise ArgumentProblem("-p/--param belongs to a builder's name")
    if sources != ["cu_seqlens"] and (args.causal or args.window or args.cu_seqlens_k):
        raise ArgumentProblem("--causal, --window and --cu-seqlens-k belong to --cu-seqlens")
    if args.mask is not None:
        return _built_mask(args.mask, _parameters(args.param))
    return _sliced_mask(args.slices) if args.slices is not None else _packed_mask(args)


def _algorithms() -> dict[str, Any]:
    from .. import config
    from ..config import DispatchAlg

    kinds = [getattr(config, name) for name in config.__all__]
    return {
        k.type.value: k for k in kinds if isinstance(k, type) and issubclass(k, DispatchAlg) and k is not DispatchAlg
    }


def _config(args: argparse.Namespace) -> "DistAttnConfig":
    from ..config import DispatchConfig, DistAttnConfig, OverlapConfig

    algorithms = _algorithms()
    if args.alg not in algorithms:
        raise ArgumentProblem(f"--alg must be one of {', '.join(algorithms)}, got {args.alg!r}")
    if args.degree == "auto":
        degree = None
    else:
        try:
            degree = int(args.degree)
        except ValueError:
            raise ArgumentProblem(f"--degree must be an integer or 'auto', got {args.degree!r}") from None
    try:
        return DistAttnConfig(
            dispatch_config=DispatchConfig(args.chunk_size, args.uneven_shard, algorithms[args.alg]()),
            overlap_config=OverlapConfig(
                degree=degree, min_chunk_size=args.min_chunk_size, max_num_chunks=args.max_num_chunks
            ),
        )
    except (ValueError, TypeError) as error:
        raise ArgumentProblem(str(error)) from None


@dataclass(frozen=True)
class Planned:
    """A plan and what it was made of."""

    mask: "Mask"
    plan: "DistPlan"
    chunk_size: int
    options: Any


def plan_mask(mask: "Mask", world_size: int, config: "DistAttnConfig") -> Planned:
    """Plan a mask as a key over ``world_size`` ranks would be, without a group.

    Raises:
        ValueError: sizes that do not fit.
    """
    import numpy as np
    from magi_core.planner import Owners, plan_distributed

    from .. import env
    from ..planning.solve import chunk_size_for, place_by_area, place_contiguously, plan_options

    dispatch = config.dispatch_config
    even = not dispatch.uneven_shard and world_size > 1
    chunk_size = chunk_size_for(
        mask.bands, mask.total_q, world_size, dispatch, dispatch.alg, env.snapshot().min_chunks_per_rank
    )
    queries = place_by_area(mask.bands, mask.total_q, world_size, chunk_size, dispatch.alg, even=even)
    keys = queries if mask.total_q == mask.total_k else place_contiguously(mask.total_k, world_size, even=even)
    owners = [Owners([r.astype(np.int32) for r in place.ranges], place.total) for place in (queries, keys)]
    options = plan_options(config.overlap_config)
    plan = plan_distributed(mask.bands, mask.total_q, mask.total_k, owners[0], owners[1], options)
    return Planned(mask, plan, chunk_size, options)


def run(args: argparse.Namespace) -> int:
    """Plan, print, draw."""
    try:
        return _run(args)
    except ArgumentProblem as problem:
        print(f"{args.prog}: error: {problem}", file=sys.stderr)
        return 2


def _run(args: argparse.Namespace) -> int:
    for name in ("world_size", "num_heads_kv", "head_dim", "height", "width"):
        if getattr(args, name) < 1:
            raise ArgumentProblem(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    if args.head_dim_v is not None and args.head_dim_v < 1:
        raise ArgumentProblem(f"--head-dim-v must be at least 1, got {args.head_dim_v}")
    from magi_core.planner import explain_plan, verify

    mask, config = _mask(args), _config(args)
    try:
        if not args.allow_overlap:
            mask.check()
        planned = plan_mask(mask, args.world_size, config)
    except ValueError as error:
        raise ArgumentProblem(str(error)) from None
    head_dim_v = args.head_dim if args.head_dim_v is None else args.head_dim_v
    bytes_per_token = args.num_heads_kv * (args.head_dim + head_dim_v) * _ITEM_BYTES[args.dtype]
    report = explain_plan(planned.plan, bytes_per_token, planned.options)
    if args.verify:
        verify(planned.plan)
    if args.json:
        print(json.dumps(report.to_dict() | {"chunk_size": planned.chunk_size, "area": int(mask.area())}, indent=2))
    else:
        total = mask.total_q * mask.total_k
        share = f", {100 * mask.area() / total:.2f} % of all" if total else ""
        print(f"mask: {mask.total_q} x {mask.total_k}, {mask.area()} visible pairs{share}")
        print(f"chunks of {planned.chunk_size} tokens; {bytes_per_token} bytes per token of keys and values")
        print(report)
        if args.verify:
            print("verified: every visible pair is computed once, transfers are symmetric, areas add up")
    _draw(args, planned)
    return 0


def _draw(args: argparse.Namespace, planned: Planned) -> None:
    from .. import drawing

    owners = planned.plan.q_owners
    ranges = [owners.ranges(rank) for rank in range(args.world_size)]

    def grid(height: int, width: int) -> drawing.IntArray:
        mask = planned.mask
        return drawing.rank_grid(mask.bands, mask.total_q, mask.total_k, ranges, height, width)

    if not args.json and not args.no_text:
        cells = grid(args.height, args.width)
        if cells.size:
            print("\nrows are queries, columns keys; a symbol is the rank that computes, '.' is masked")
            print(drawing.to_text(cells, colour=sys.stdout.isatty()))
    if args.png is not None:
        cells = grid(1024, 1024)
        if cells.size == 0:
            raise ArgumentProblem("--png: a mask without tokens has no picture")
        try:
            drawing.write_png(args.png, cells, scale=max(1, 512 // max(cells.shape)))
        except OSError as error:
            raise ArgumentProblem(f"--png {args.png}: {error.strerror or error}") from None
        print(f"wrote {args.png}", file=sys.stderr)


def add_parser(commands: Any) -> None:
    """Add the command to a parser."""
    parser = commands.add_parser(
        "plan",
        help="balance and bytes per rank of a mask",
        description="Plan a mask over ranks, as a key would, and print balance, traffic and a picture.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=(
            "examples:\n"
            "  python -m magi_attention plan causal -p total_q=8192 --world-size 8\n"
            "  python -m magi_attention plan documents -p lengths=1000,4000,3192 -p causal=true --world-size 4\n"
            "  python -m magi_attention plan --cu-seqlens 0,1000,5000,8192 --causal --world-size 4 --png mask.png\n"
            "  echo '[[0,64,0,64,\"causal\"],[64,96,0,96]]' | python -m magi_attention plan --slices - --world-size 2\n"
        ),
    )
    source = parser.add_argument_group("mask (one of)")
    source.add_argument("mask", nargs="?", choices=BUILDERS, help="a mask builder; -p gives its parameters")
    source.add_argument("--slices", metavar="FILE", help="JSON: [[q0, q1, k0, k1, type], ...] or an object; - is stdin")
    source.add_argument("--cu-seqlens", metavar="0,A,B,...", help="packed documents")
    parser.add_argument(
        "-p",
        "--param",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="of the builder, as of magi_core.Mask's method; a list is A,B,C",
    )
    parser.add_argument("--cu-seqlens-k", metavar="0,A,B,...", help="of the keys, when they differ")
    parser.add_argument("--causal", action="store_true", help="causal documents")
    parser.add_argument("--window", metavar="LEFT,RIGHT", help="window of documents, -1 for no limit")
    parser.add_argument("--world-size", type=int, required=True, metavar="N", help="ranks")
    parser.add_argument("--chunk-size", type=int, metavar="TOKENS", help="largest chunk (default: by world size)")
    parser.add_argument("--uneven-shard", action="store_true", help="no padding; ranks may hold different numbers")
    parser.add_argument("--alg", default="balanced", help="placement of chunks (default: balanced)")
    parser.add_argument("--degree", default="1", help="remote stages, or 'auto' (default: 1)")
    parser.add_argument("--min-chunk-size", type=int, default=512, metavar="TOKENS", help="smallest piece of keys")
    parser.add_argument("--max-num-chunks", type=int, default=64, metavar="N", help="most pieces of keys")
    parser.add_argument("--num-heads-kv", type=int, default=8, metavar="N", help="for bytes (default: 8)")
    parser.add_argument("--head-dim", type=int, default=128, metavar="D", help="for bytes (default: 128)")
    parser.add_argument("--head-dim-v", type=int, metavar="D", help="for bytes (default: head dim)")
    parser.add_argument("--dtype", choices=_ITEM_BYTES, default="bf16", help="for bytes (default: bf16)")
    parser.add_argument("--allow-overlap", action="store_true", help="count pairs that two slices show twice")
    parser.add_argument("--verify", action="store_true", help="check the plan by brute force")
    parser.add_argument("--json", action="store_true", help="numbers as JSON, no picture")
    parser.add_argument("--png", metavar="FILE", help="write the picture")
    parser.add_argument("--no-text", action="store_true", help="no picture on the terminal")
    parser.add_argument("--height", type=int, default=32, help="lines of the picture (default: 32)")
    parser.add_argument("--width", type=int, default=64, help="columns of the picture (default: 64)")
    parser.set_defaults(run=run, prog=parser.prog)
