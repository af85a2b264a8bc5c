"""Writes the table of operators that a program may call: `python -m tests.program.make_operators [--check]`.

Run on each supported torch: the table is the union, and an overload that a torch lacks is refused there by name.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch

from holdfast.program.schemas import Argument, SchemaProblem, parse_schema

TABLE = Path(__file__).parents[2] / "src" / "holdfast" / "program" / "operators.txt"

# Private operators that torch.export leaves in graphs, beside those with the tag "core".
PRIVATE = frozenset(
    """
    _assert_async.default _assert_async.msg _assert_scalar.default _assert_tensor_metadata.default
    _conj.default _neg_view.default _conj_physical.default
    _fused_rms_norm.default _linalg_det.default _linalg_eigh.default _linalg_slogdet.default
    _linalg_solve_ex.default _linalg_svd.default _prelu_kernel.default _fft_c2c.default
    _logcumsumexp.default _safe_softmax.default _scaled_dot_product_flash_attention_for_cpu.default
    _native_batch_norm_legit_functional.default _unsafe_index.Tensor _unsafe_view.default _weight_norm.default
    _weight_norm_interface.default _upsample_bicubic2d_aa.default _upsample_bicubic2d_aa.vec
    _upsample_bilinear2d_aa.default _upsample_bilinear2d_aa.vec _upsample_nearest_exact1d.default
    _upsample_nearest_exact1d.vec _upsample_nearest_exact2d.default _upsample_nearest_exact2d.vec
    _upsample_nearest_exact3d.default _upsample_nearest_exact3d.vec _is_all_true.default _is_any_true.default
    __and__.Scalar __and__.Tensor __or__.Scalar __or__.Tensor __xor__.Scalar __xor__.Tensor
    __iand__.Scalar __iand__.Tensor __ior__.Scalar __ior__.Tensor __ixor__.Scalar __ixor__.Tensor
    __lshift__.Scalar __lshift__.Tensor __rshift__.Scalar __rshift__.Tensor
    _trilinear.default _euclidean_dist.default _masked_softmax.default
    """.split()
)

# Exceptions from the families below.
KEPT = frozenset(
    "_to_copy.default copy.default lift_fresh_copy.default lift_fresh.default as_strided.default "
    "detach_.default".split()
)

# Whole families: files, storage, uninitialized memory, gradients, other layouts and libraries, sizes of other calls.
REFUSED = re.compile(
    r"from_file|set|set_|set_data|data|resize.*|empty.*|new_empty.*|as_strided_|record_stream|requires_grad_|retain_grad"
    r"|retains_grad|backward|.*_backward|.*_backward_.*|.*_jvp|pin_memory|is_pinned|is_leaf|output_nr|_version"
    r"|.*(cudnn|mkldnn|miopen|mps|xnnpack|nnpack|fbgemm|vulkan).*|.*sparse.*|.*(csr|csc|bsr|bsc|coo).*|.*quantize.*|q_.*"
    r"|.*qint.*|.*(nested|jagged).*|int_repr|.*fake_quant.*|.*_copy|rename.*|align_.*|refine_names|names|unflatten_dense.*"
    r"|.*forward_ad|values|indices|ccol_indices|crow_indices|col_indices|row_indices|coalesce.*|is_coalesced|unsafe_.*"
    r"|choose_qparams.*|quantized_.*|dense_dim|lift.*|swapaxes_|storage.*|special_.*_out|can_cast|promote_types|result_type"
    r"|is_set_to|alias_copy|data_ptr|cuda|cpu|to_.*|fused_moving_avg.*|get_gradients|rrelu_with_noise.*|histogramdd.*"
    r"|sspaddmm|hspmm|smm|native_norm|mvlgamma_|infinitely_differentiable.*|is_distributed|is_vulkan.*|item_.*|mkl.*"
    r"|sum_to_size_.*|thnn.*|.*_thnn.*|slow_conv.*|glu_.*|.*_dense_.*|.*flatten_dense.*|miopen.*|rnn_.*_cell.*_fused|sym_is_.*"
    # kernels that trust their indices
    r"|segment_reduce|.*ldl_solve|.*lu_solve|batch_norm_.*stats.*|batch_norm_elemt|convolution_overrideable"
    # TorchScript's own, on lists, texts and dicts
    r"|Bool|Complex|ComplexImplicit|Delete|Float|FloatImplicit|Int|IntImplicit|ScalarImplicit|__.*__|_set_item|append|as_.*"
    r"|capitalize|center|confirmed_by_owner|copy|count|dict|divmod|endswith|expandtabs|extend|find|format|get|get_device"
    r"|grad|hash|hex|insert|is.*lower|is.*upper|isalnum|isalpha|isdecimal|isdigit|isidentifier|isnumeric|isprintable|isspace"
    r"|istitle|items|join|keys|len|list|ljust|lower|lstrip|manual_seed|oct|ord|partition|percentFormat|pop|popitem|replace"
    r"|rfind|rindex|rjust|rpartition|rsplit|rstrip|save|seed|setdefault|sort_str|splitlines|startswith|str|strip|swapcase"
    r"|tensor|title|update|upper|wait|warn|warns|zfill|_infer_size|_no_grad.*|_unwrap_optional|cauchy_generator|log_hessian"
)
# Types of arguments that JSON values have, and types of results.
TYPES = frozenset(
    "Tensor int SymInt float bool str number Scalar complex ScalarType Layout Device MemoryFormat SymBool "
    "SymFloat".split()
)
RETURNS = frozenset("Tensor int SymInt float bool Scalar number SymBool".split())


def allowed(full: str, op) -> bool:
    """Whether a program may call the operator."""
    (name, overload), schema = full.split("."), op._schema
    core = torch.Tag.core in op.tags
    if full in PRIVATE or full in KEPT:
        return True
    if name.startswith("_") and not core:
        return False
    if REFUSED.fullmatch(name) or overload.endswith("_out") or re.search("[Nn]ame", overload):
        return False
    if torch.Tag.inplace_view in op.tags:
        return False
    if any(argument.is_out for argument in schema.arguments):
        return False
    try:
        parsed = parse_schema(str(schema))
    except SchemaProblem:
        return False
    return all(_says(argument) for argument in parsed.arguments) and all(
        kind.base in RETURNS and not kind.has_optional_items for kind in parsed.returns
    )


def _says(argument: Argument) -> bool:
    if argument.type.base == "Generator":
        return argument.has_default
    return argument.type.base in TYPES


def overloads() -> dict[str, torch._ops.OpOverload]:
    """Every aten overload of the running torch by name."""
    found = {}
    for full in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = full.partition("::")
        if namespace == "aten":
            name, _, overload = rest.partition(".")
            found[f"{name}.{overload or 'default'}"] = getattr(getattr(torch.ops.aten, name), overload or "default")
    return found


def table() -> set[str]:
    """The operators of the running torch that a program may call."""
    return {full for full, op in overloads().items() if allowed(full, op)}


def main() -> int:
    before = {line for line in TABLE.read_text().splitlines() if line and line[0] != "#"} if TABLE.exists() else set()
    lines = sorted(before | table())
    if "--check" in sys.argv:
        return int(lines != sorted(before))
    head = "# aten overloads that a program may call: python -m tests.program.make_operators\n"
    TABLE.write_text(head + "\n".join(lines) + "\n", encoding="ascii")
    print(f"{len(lines)} overloads in {TABLE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
