"""Elementwise operations: no shard ever needs to talk."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.spmd.table import Table

TABLE = Table("pointwise")

ANY = "abs neg exp sin cos tan tanh sigmoid erf sinh cosh asinh atan relu sign ceil floor round trunc frac square "
ANY += "expm1 exp2 erfc sinc sgn positive deg2rad rad2deg isnan isinf isfinite signbit logical_not nan_to_num angle"
for _name in ANY.split():
    TABLE.add(_name, getattr(torch, _name), "nm", free="nm")
for _name in "sqrt rsqrt log log2 log10 log1p reciprocal lgamma digamma".split():
    TABLE.add(_name, getattr(torch, _name), "positive:nm", free="nm")
for _name in "acos asin atanh logit erfinv".split():
    TABLE.add(_name, getattr(torch, _name), "unit:nm", free="nm")
TABLE.add("acosh", lambda x: torch.acosh(x + 1), "positive:nm", free="nm")
TABLE.add("i0", torch.special.i0, "nm", free="nm")
TABLE.add("xlogy", torch.xlogy, "nm", "positive:nm", free="nm")

ACTIVATIONS = "hardtanh relu6 hardswish hardsigmoid hardshrink softshrink logsigmoid gelu silu elu selu celu "
ACTIVATIONS += "leaky_relu mish softplus softsign tanhshrink threshold"
for _name in ACTIVATIONS.split():
    _call = (lambda x: F.threshold(x, 0.1, 0.2)) if _name == "threshold" else getattr(F, _name)
    TABLE.add(f"F.{_name}", _call, "nm", free="nm")
TABLE.add("F.gelu_tanh", lambda x: F.gelu(x, approximate="tanh"), "nm", free="nm")
TABLE.add("F.prelu", F.prelu, "nm", "m", free="m")
TABLE.add("F.prelu_one", F.prelu, "nm", "1")
TABLE.add("F.glu", lambda x: F.glu(x, 1), "nc", free="n")
TABLE.add("F.rrelu_eval", lambda x: F.rrelu(x, training=False), "nm", free="nm")

BINARY = "add sub mul div atan2 fmax fmin maximum minimum hypot copysign true_divide"
for _name in BINARY.split():
    TABLE.add(_name, getattr(torch, _name), "nm", "positive:nm", free="nm")
for _name in "fmod remainder floor_divide eq ne lt le gt ge logical_and logical_or logical_xor nextafter".split():
    TABLE.add(_name, getattr(torch, _name), "nm", "positive:nm", free="nm", grad=_name in ("fmod", "remainder"))
TABLE.add("pow_tensor", torch.pow, "positive:nm", "nm", free="nm")
TABLE.add("pow_scalar", lambda x: torch.pow(x, 3), "nm", free="nm")
TABLE.add("scalar_pow", lambda x: torch.pow(2.0, x), "nm", free="nm")
TABLE.add("logaddexp", torch.logaddexp, "nm", "nm", free="nm")
TABLE.add("logaddexp2", torch.logaddexp2, "nm", "nm", free="nm")
TABLE.add("polar", lambda x, y: torch.view_as_real(torch.polar(x, y)), "positive:nm", "nm", free="nm")
TABLE.add("complex", lambda x, y: torch.view_as_real(torch.complex(x, y)), "nm", "nm", free="nm")
TABLE.add("add_broadcast", lambda x, y: x + y, "nm", "m", free="m")
TABLE.add("mul_broadcast", lambda x, y: x * y, "nm", "m", free="m")
TABLE.add("add_scalar", lambda x: x + 2.5, "nm", free="nm")
TABLE.add("mul_scalar", lambda x: x * 2.5, "nm", free="nm")
TABLE.add("rsub", lambda x: 1 - x, "nm", free="nm")
TABLE.add("rdiv", lambda x: 1 / x, "positive:nm", free="nm")
TABLE.add("lerp_scalar", lambda x, y: torch.lerp(x, y, 0.3), "nm", "nm", free="nm")
TABLE.add("lerp_tensor", torch.lerp, "nm", "nm", "unit:nm", free="nm")
TABLE.add("addcmul", lambda x, y, z: torch.addcmul(x, y, z, value=0.5), "nm", "nm", "nm", free="nm")
TABLE.add("addcdiv", lambda x, y, z: torch.addcdiv(x, y, z, value=0.5), "nm", "nm", "positive:nm", free="nm")
TABLE.add("where", torch.where, "bool:nm", "nm", "nm", free="nm")
TABLE.add("where_plain", torch.where, "plainbool:nm", "nm", "nm")
TABLE.add("clamp", lambda x: torch.clamp(x, -0.5, 0.5), "nm", free="nm")
TABLE.add("clamp_min", lambda x: torch.clamp(x, min=0.1), "nm", free="nm")
TABLE.add("clamp_tensor", lambda x, y: torch.clamp(x, min=y), "nm", "nm", free="nm")
TABLE.add("masked_fill", lambda x, mask: x.masked_fill(mask, 0.5), "nm", "bool:nm", free="nm")
TABLE.add("masked_fill_plain", lambda x, mask: x.masked_fill(mask, 0.5), "nm", "plainbool:nm")
TABLE.add("masked_fill_tensor", lambda x, mask, v: x.masked_fill(mask, v.sum()), "nm", "bool:nm", "m")
TABLE.add("to_float32", lambda x: x.to(torch.float32).to(torch.float64), "nm", free="nm", partial=False)
TABLE.add("clone", torch.clone, "nm", free="nm")
TABLE.add("zeros_like", torch.zeros_like, "nm", free="nm", grad=False)
TABLE.add("ones_like", torch.ones_like, "nm", free="nm", grad=False)
TABLE.add("isclose", torch.isclose, "nm", "nm", free="nm", grad=False)
TABLE.add("heaviside", torch.heaviside, "nm", "nm", free="nm", grad=False)
TABLE.add("ldexp", torch.ldexp, "nm", "int:nm", free="nm")
TABLE.add("frexp", lambda x: torch.frexp(x)[0], "nm", free="nm")
TABLE.add("float_power", lambda x: torch.float_power(x, 2), "positive:nm", free="nm")
TABLE.add("view_as_real", lambda x: torch.view_as_real(torch.complex(x, x)), "nm", free="nm")

for _name in "bitwise_and bitwise_or bitwise_xor gcd lcm".split():
    TABLE.add(_name, getattr(torch, _name), "int:nm", "int:nm", free="nm", grad=False)
TABLE.add("bitwise_not", torch.bitwise_not, "int:nm", free="nm", grad=False)
TABLE.add("bitwise_left_shift", lambda x: x << 2, "int:nm", free="nm", grad=False)
TABLE.add("bitwise_right_shift", lambda x: x >> 1, "int:nm", free="nm", grad=False)
TABLE.add("bitwise_shift_tensor", torch.bitwise_left_shift, "int:nm", "int:nm", free="nm", grad=False)
TABLE.add("shift_by_tensor", lambda x, y: x >> (y & 3), "int:nm", "int:nm", free="nm", grad=False)

for _name in "add_ sub_ mul_ div_ copy_ atan2_".split():
    TABLE.add(f"inplace_{_name}", lambda x, y, _n=_name: getattr(x.clone(), _n)(y), "nm", "positive:nm", free="nm")
for _name in "exp_ sin_ tanh_ sigmoid_ relu_ neg_ abs_ square_ zero_".split():
    TABLE.add(f"inplace_{_name}", lambda x, _n=_name: getattr(x.clone(), _n)(), "nm", free="nm")
TABLE.add("inplace_fill_", lambda x: x.clone().fill_(2.0), "nm", free="nm")
TABLE.add("inplace_clamp_", lambda x: x.clone().clamp_(-0.5, 0.5), "nm", free="nm")
TABLE.add("inplace_masked_fill_", lambda x, mask: x.clone().masked_fill_(mask, 1.5), "nm", "bool:nm", free="nm")
TABLE.add("inplace_addcmul_", lambda x, y, z: x.clone().addcmul_(y, z), "nm", "nm", "nm", free="nm")
TABLE.add("inplace_addcdiv_", lambda x, y, z: x.clone().addcdiv_(y, z), "nm", "nm", "positive:nm", free="nm")
TABLE.add("inplace_lerp_", lambda x, y: x.clone().lerp_(y, 0.3), "nm", "nm", free="nm")
for _name in "eq ne lt le gt ge".split():
    TABLE.add(f"{_name}_scalar", lambda x, _n=_name: getattr(torch, _n)(x, 0.0), "ties:nm", free="nm", grad=False)
