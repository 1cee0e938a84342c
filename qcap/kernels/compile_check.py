"""Every kernel with the arguments it is called with, so that all of them can be compiled for devices that are not here.

``compile_case(case, target)`` runs Triton's whole compiler for a target such as ``cuda sm_90`` or ``hip gfx942`` and needs no GPU. It
needs Triton not to be in interpreter mode.
"""
# mypy: disable-error-code="import-untyped, no-untyped-call"

from __future__ import annotations

from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from qcap.kernels import checks

TARGETS = {
    "cuda sm_80": ("cuda", 80, 32),
    "cuda sm_90": ("cuda", 90, 32),
    "cuda sm_100": ("cuda", 100, 32),
    "hip gfx942": ("hip", "gfx942", 64),
}


@dataclass(frozen=True)
class Case:
    """One kernel (``module`` and ``kernel`` name it) with its argument types by name, and its constants.

    ``not_for`` names the targets that cannot do this case, which is then a documented limit of the op.
    """

    name: str
    module: str
    kernel: str
    types: dict[str, str]
    constants: dict[str, Any]
    not_for: tuple[str, ...] = field(default=())


def _slot_attribution(name: str, slots: str, count: bool, block_size: int = 16) -> Case:
    types = {"slot_mapping_ptr": slots, "plan_ptr": "*i64", "ring_slots_ptr": "*i64", "stamps_ptr": "*i64"}
    types["counts_ptr"] = "*i32" if count else "*i64"
    types |= dict.fromkeys(("num_rows", "num_out", "num_slots", "num_counts", "length"), "i32")
    constants = {"BLOCK_SIZE": block_size, "COUNT": count, "BLOCK": 256}
    return Case(name, "slot_attribution", "slot_attribution_kernel", types, constants)


def _row_scatter(name: str, rows: str, ring: str, width: int = 4096, column: Any = 1, not_for: tuple[str, ...] = ()) -> Case:
    types = {"rows_ptr": rows, "ring_slots_ptr": "*i64", "ring_ptr": ring, "num_slots": "i32", "stride_row": "i64", "stride_slot": "i64"}
    constants: dict[str, Any] = {"H": width, "BLOCK_H": min(triton.next_power_of_2(width), 4096)}
    if column == 1:
        constants["stride_col"] = 1
    else:
        types["stride_col"] = "i64"
    return Case(name, "row_scatter", "row_scatter_kernel", types, constants, not_for)


def _row_scatter_layers(name: str, rows: str, ring: str, width: int = 4096, column: Any = 1, not_for: tuple[str, ...] = ()) -> Case:
    one = _row_scatter(name, rows, ring, width, column, not_for)
    types = {**dict.fromkeys((f"rows_{layer}_ptr" for layer in range(checks.MAX_LAYERS)), rows), **one.types, "stride_layer": "i64"}
    del types["rows_ptr"]
    return replace(one, kernel="row_scatter_layers_kernel", types=types)


def _paged_copy(name: str, bits: str, gather: bool, shape: tuple[int, int, int], tile: tuple[int, int], dim_stride_one: bool) -> Case:
    types = {"pages_ptr": "*i64", "block_ids_ptr": "*i64", "rows_ptr": bits}
    types |= dict.fromkeys(("first_plane", "first_layer", "table_layers", "num_layers", "plane_rows", "layer_rows", "num_blocks"), "i32")
    types |= {"stride_block": "i64", "stride_head": "i64", "stride_token": "i64"}
    heads, n, d = shape
    constants: dict[str, Any] = {"HEADS": heads, "N": n, "D": d, "GATHER": gather, "ALIGNED": dim_stride_one}
    constants |= {"BLOCK_N": tile[0], "BLOCK_D": tile[1]}
    if dim_stride_one:
        constants["stride_dim"] = 1
    else:
        types["stride_dim"] = "i32"
    return Case(name, "paged_copy", "paged_copy_kernel", types, constants)


def _rope_shift(name: str, keys: str, head_size: int, half: int, interleaved: bool) -> Case:
    types = {"keys_ptr": keys, "old_positions_ptr": "*i64", "new_positions_ptr": "*i64", "inv_freq_ptr": "*fp32", "out_ptr": keys}
    types["num_tokens"] = "i32"
    types |= {f"{which}_stride_{axis}": "i64" for which in ("keys", "out") for axis in ("token", "head")}
    constants = {
        "keys_stride_dim": 1,
        "out_stride_dim": 1,
        "HEADS": 8,
        "D": head_size,
        "HALF": half,
        "INTERLEAVED": interleaved,
        "COPY_REST": 2 * half < head_size,
    }
    constants |= import_module("qcap.kernels.rope_shift").block_shape(8, head_size, half)
    return Case(name, "rope_shift", "rope_shift_kernel", types, constants)


def _attention_mass(name: str, kernel: str, dtype: str, head_size: int, block: int, options: bool) -> Case:
    types = {
        "q_ptr": dtype,
        "k_ptr": dtype,
        "lse_ptr": "*fp32",
        "num_queries": "i32",
        "num_keys": "i32",
        "scale": "fp32",
        "softcap": "fp32",
    }
    types |= {"sliding_window": "i32"}
    types |= {f"{which}_stride_{axis}": "i64" for which in ("q", "k") for axis in ("token", "head")}
    if kernel == "row_lse_kernel":
        types |= {"stride_head": "i64", "keys_per_split": "i32"}
    else:
        types |= {"sums_ptr": "*fp32", "first_query": "i32"}
    constants = {
        "q_stride_dim": 1,
        "k_stride_dim": 1,
        "GROUP": 4,
        "D": head_size,
        "SOFTCAP": options,
        "SLIDING": options,
        "BLOCK_M": block,
        "BLOCK_N": block,
        "BLOCK_D": max(16, triton.next_power_of_2(head_size)),
    }
    return Case(name, "attention_mass", kernel, types, constants)


def _join_lse() -> Case:
    types = {"parts_ptr": "*fp32", "lse_ptr": "*fp32", "stride_head": "i64", "num_queries": "i32"}
    return Case("attention_mass join_lse_kernel", "attention_mass", "join_lse_kernel", types, {"SPLITS": 20, "BLOCK_S": 32, "BLOCK_M": 64})


def _host_read() -> Case:
    types = {"target_ptr": "*i64", "source_ptr": "*i64", "length": "i32"}
    return Case("host_read", "host_read", "host_read_kernel", types, {"BLOCK": 1024})


CASES: tuple[Case, ...] = (
    _host_read(),
    _slot_attribution("slot_attribution int64", "*i64", False),
    _slot_attribution("slot_attribution int32, counted", "*i32", True),
    _slot_attribution("slot_attribution int64, odd block", "*i64", True, 12),
    _row_scatter("row_scatter 16 bits", "*i16", "*i16"),
    _row_scatter("row_scatter fp32 to bf16, strided, odd width", "*fp32", "*bf16", width=577, column="strided"),
    _row_scatter("row_scatter bf16 to fp16", "*bf16", "*fp16"),
    _row_scatter("row_scatter fp8e5 to bf16", "*fp8e5", "*bf16"),
    _row_scatter("row_scatter fp8e4nv to bf16", "*fp8e4nv", "*bf16", not_for=("cuda sm_80",)),
    _row_scatter_layers("row_scatter_layers 16 bits", "*i16", "*i16"),
    _row_scatter_layers("row_scatter_layers fp32 to bf16, strided, odd width", "*fp32", "*bf16", width=577, column="strided"),
    _row_scatter_layers("row_scatter_layers fp8e4nv to bf16", "*fp8e4nv", "*bf16", not_for=("cuda sm_80",)),
    _paged_copy("paged_copy gather 16 bits", "*i16", True, (8, 16, 128), (16, 128), True),
    _paged_copy("paged_copy scatter 16 bits", "*i16", False, (8, 16, 128), (16, 128), True),
    _paged_copy("paged_copy gather 8 bits, strided, odd", "*u8", True, (3, 12, 80), (16, 128), False),
    _paged_copy("paged_copy gather a ring", "*i16", True, (1, 16, 4096), (4, 1024), True),
    _rope_shift("rope_shift bf16", "*bf16", 128, 64, False),
    _rope_shift("rope_shift bf16 interleaved", "*bf16", 128, 64, True),
    _rope_shift("rope_shift fp32 partial interleaved", "*fp32", 80, 16, True),
    _rope_shift("rope_shift fp16 no rope", "*fp16", 64, 0, False),
    *(
        _attention_mass(f"attention_mass {kernel} {dtype} {size} options={options}", kernel, f"*{dtype}", size, block, options)
        for kernel in ("row_lse_kernel", "column_sums_kernel")
        for dtype, size, block, options in (("bf16", 128, 64, False), ("fp32", 80, 32, True))
    ),
    _join_lse(),
)


def compile_case(case: Case, target: str, aligned: bool = False) -> Any:
    """Compile ``case`` for a target of ``TARGETS`` to machine code; the compiled kernel.

    ``aligned``: as for addresses and numbers that are all multiples of 16, which is what lets loads and stores be wide.

    Raises:
        Exception: whatever the compiler says.
        KeyError: the case does not name the kernel's arguments, because the kernel has changed.
    """
    function = getattr(import_module(f"qcap.kernels.{case.module}"), case.kernel)
    given = {**case.types, **dict.fromkeys(case.constants, "constexpr")}
    signature = {name: given.pop(name) for name in function.arg_names}
    if given:
        raise KeyError(f"{case.name}: {case.kernel} has no arguments {sorted(given)}")
    attrs = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind[0] in "*i"} if aligned else None
    source = ASTSource(fn=function, signature=signature, constexprs=case.constants, attrs=attrs)
    return triton.compile(source, target=GPUTarget(*TARGETS[target]))
