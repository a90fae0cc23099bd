"""Chains: what is part of one, and why one ends. A line is a forward of (self, x, y): see `table.py`."""

from __future__ import annotations

from tests.fusion.forwards import WIDTH
from tests.fusion.table import Row, rows

SPELLINGS = rows("""
# chains=(1, 1), formula="relu(acc + c1)"
return self.act(self.fc0(x))
return torch.relu_(self.fc0(x))
return F.relu(self.fc0(x), inplace=True)
return self.fc0(x).relu()
return self.fc0(x).relu_()
return self.act(self.same(self.fc0(x)))
return F.relu(F.linear(x, self.weight, self.column))
return torch.relu(self.fc2(x) + self.column)
return torch.add(self.fc2(x), self.column).relu()
return self.fc2(x).add_(self.column).relu_()
return torch.relu(x @ self.fc0.weight.T + self.fc0.bias)
return torch.relu(x @ torch.t(self.fc0.weight) + self.fc0.bias)
return torch.relu(x @ self.fc0.weight.transpose(0, 1) + self.fc0.bias)
return torch.relu(x @ self.weight + self.column)
return torch.relu(x @ self.weight.view(8, 8) + self.column)
return self.fc0(x).relu_().view(-1)
# chains=(1, 1), formula="relu(acc)"
return torch.relu(x @ self.fc2.weight.mT)
return F.relu(F.linear(x, weight=self.fc2.weight))
return F.linear(x, self.weight * self.weight).relu()
return F.linear(x[:0], self.weight).relu()
return F.linear(x[..., :0], self.weight[:, :0]).relu()
return (x.transpose(0, 1) @ self.weight.t()).relu()
# chains=(1, 1), formula="relu(acc + c1) / -4"
return self.act(self.fc0(x)) / -4.0
return torch.div(self.fc0(x).relu(), -4.0)
# chains=(1, 1)
return torch.relu(self.fc0(x)) / self.divisor
return torch.relu(self.column + self.fc2(x))
return -0.25 * self.fc0(x).relu()
return self.fc0(x).relu() * 1e300
return self.fc0(x).relu() / 0
return self.fc0(x).relu() / -0.0
return self.fc0(x).relu() * torch.nan
return self.fc0(x).relu() / torch.inf
return self.fc0(x).relu() / 2**62
return self.fc0(x).relu() * True
return 2 / (self.fc0(x).relu() + 1)
z = self.fc0(x); return torch.sigmoid(z) * self.factor + z
z = self.fc0(x); return z + -2.0 * z.sigmoid()
z = self.fc0(x); return torch.add(z, z.sigmoid(), alpha=-2.0)
z = self.fc0(x); return torch.add(z.sigmoid(), z, alpha=3)
z = self.fc0(x); return z - F.sigmoid(z) * 2.0
z = self.fc0(x); return torch.sigmoid(z) * 3 - z
z = self.fc0(x); return z + torch.sigmoid(z) / -0.5
z = self.fc0(x); return z + torch.sigmoid(z) * self.learned
z = self.fc0(x); s = z.sigmoid() * 3.0; s += z; return s
z = self.fc0(x); return z + z
z = self.fc0(x); return z * torch.sigmoid(z)
return self.fc0(x) * self.column
return torch.mul(self.column, self.fc0(x))
return self.fc2(x).mul_(self.column)
return torch.add(self.fc2(x), self.column, alpha=2)
return self.fc0(x) + self.column
return torch.tanh(self.fc0(x)) * self.fc0.bias
return torch.tanh(self.fc2(x)) * y[..., :1]
return (torch.sigmoid(self.fc0(x)) - y) * y[..., :1]
return F.linear(x, self.weight.detach(), self.column).relu() / 2
return F.linear(x.detach(), self.weight).tanh()
return F.hardswish(self.fc0(x))
return self.fc0(x) * (self.column + 1)
return self.fc2(x) * self.column[:1]
return self.fc0(x).view_as(x) * 2
z = self.fc0(x); torch._C._log_api_usage_once("tests"); return z + x
return self.drop(self.fc0(x)) + x
z = F.alpha_dropout(F.dropout(self.fc0(x), 0.0), 0.0, True); return torch.dropout(z, 0.0, True) + x
z = torch.feature_dropout(self.fc0(x), 0.0, True); return F.feature_alpha_dropout(z, 0.0, True) + x
return F.prelu(self.fc0(x), self.slope)
z = self.fc0(x); return torch.where((z > 0) & ~(z >= self.column), z * self.slope, z)
z = self.fc0(x); return z.masked_fill(z.lt(x), 0.0) + (z > 0).to(z.dtype) * x
return self.fc0(x).float().relu().to(x.dtype)
return (self.fc0(x).float() * self.number).to(x.dtype)
return (-2.0) ** torch.relu(self.fc0(x)).round()
# chains=(1, 1), axes=2, learns="parameters"
return self.batch_norm(self.fc0(x))
return self.batch_norm(self.fc0(x) * self.column)
return self.batch_norm((self.fc2(x) + self.column) * self.vector)
return F.batch_norm(self.fc0(x), self.square[0], self.vector)
return F.batch_norm(self.fc2(x), self.square[0], self.vector, self.fc0.bias, self.fc1.bias, False, 0.1, 0.5)
return F.batch_norm(self.fc2(x), self.vector, self.square[0])
return self.fc0(x).prelu(weight=self.column)
return torch.addmm(x, y, self.fc0.weight.t(), beta=0.5, alpha=2).relu()
return F.prelu(self.fc0(x).t(), self.vector).t()
""")

_REASONS = {
    "z = self.drop(self.fc0(x)); return z + self.norm(z)": "is not pointwise",
    "z = self.fc0(x); return z, z.relu()": "output reads a value in between",
    "z = self.fc0(x); return z[0], z.relu()": "takes a part of it",
    "z = self.fc0(x); return z * 2, self.fc1(z)": "linear_1 reads a value in between",
    "return self.drop(self.fc0(x)).masked_fill(x > 0, 0.0)": "is no operand",
    "return x * self.drop(self.fc0(x)).transpose(1, 2).unsqueeze(0)": "of another shape or order",
    "return self.drop(self.fc0(x)).contiguous() + x[:1]": "takes as long as to add it",
    "z = self.fc0(x).view(-1, 2, 4); return z * torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + 1e-6)": "as norms do",
    "z = self.fc0(x); return z * x + torch.cat([-z[..., 4:], z[..., :4]], -1) * x": "takes a part of it",
    "z = self.fc0(x); return torch.relu(z) * z + z.sum()": "makes one number of several",
    "z = self.fc0(x); return z * z.sum(0)": "makes one number of several",
    "return self.fc0(x) * self.column.double()": "is no operand",
    "x = x.bfloat16(); return F.linear(x, self.weight.bfloat16()) * self.column.float()": "of another type",
}
ENDS = [
    *rows("""
# chains=(1, 1), rows=(8, 5, 3)
return torch.relu(self.fc0(x)) / x.shape[1]
#
z = self.fc0(x); return z.relu().view_as(z) * 2
z = self.fc2(x); a, b = y.chunk(2, -1); return torch.relu(z + self.column) + torch.cat([b, a], -1)
return self.fc0(x).half().relu().float()
# learns="nothing", backends=("eager",)
z = self.fc2(x); s = y[0].to_sparse(); return torch.relu(z) + s.to_dense()
#
z = self.fc0(x); return torch.add(z, z.sigmoid() * 1e17, alpha=1e17)
# chains=(0, 0)
return self.fc0(x)
return self.drop(self.fc0(x))
return self.fc0(x).view(-1, 8).transpose(0, 1)
return self.drop(self.fc0(x).float()).to(torch.float32)
return self.fc0(x).transpose(1, 2).contiguous().clone()
return self.norm(self.drop(self.fc0(x)))
z = self.fc0(x).transpose(1, 2); return z * x.mT + torch.cat([z[:, 4:], z[:, :4]], 1)
return F.softmax(self.fc0(x), -1)
return self.fc0(x).double().relu().to(x.dtype)
return torch.relu(x[0, 0] @ self.weight.t() + self.column)
return torch.relu(x @ y.mT)
return torch.relu(F.linear(x.long(), self.weight.long()))
return torch.relu(F.linear(x.to(torch.complex64), self.weight.to(torch.complex64)).abs())
"""),
    *(Row(source, (1, 0), says=text, rows=(WIDTH,)) for source, text in _REASONS.items()),
    *rows("""
# chains=(2, 1), says="is a part of another product's chain"
return self.fc0(x) + self.drop(self.fc1(x))
# chains=(0, 0), says="along the second axis", rows=SQUARE
return F.prelu(self.fc0(x), self.column)
# chains=(1, 1), says="an epilogue has at most 4"
z = self.fc0(x) * self.column; z = z * self.vector; z = z * self.plain; return z * self.square[0]
# chains=(1, 1), formula="relu(acc + c1)", rows=SQUARE
return self.fc0(x).relu() * self.weight
# chains=(1, 1)
r = self.fc0(x).relu(); return r / 2 + r
r = self.fc0(x).relu(); return torch.div(r, 2, rounding_mode='floor')
return self.fc0(x) * self.vector.view(1, 8)
z = F.linear(x, self.weight[:1]); return z * x[..., 0, None] * self.vector[:1]
z = self.fc2(x); return torch.relu(z + self.column) * torch.tanh(y).sum()
z = self.fc2(x); t = torch.ops.epigemm_tests.twice(y.detach()); return torch.relu(z) + t
z = self.fc2(x); t = torch.ops.aten.mul.Tensor(y, y); return torch.relu(z) + t
# chains=(1, 0)
return (self.fc2(x) + self.vector.double()).relu()
return (self.fc2(x) + self.vector.half()).relu()
z = self.fc2(x); t = self.checkpoint(torch.sin, y, use_reentrant=False); return torch.relu(z) + t
# chains=(3, 3)
h = self.fc0(x).relu(); h = torch.relu(h @ self.weight * 0.5).matmul(self.weight); return h / 2
# axes=2
return F.batch_norm(self.fc0(x), self.vector, self.square[0], training=True)
return F.batch_norm(self.fc2(x), self.square[0], self.vector, eps=1e-30)
return F.batch_norm(self.fc2(x[:5]).t(), self.square[0][:5], self.vector[:5]).t()
x = x.bfloat16(); return F.batch_norm(x @ self.weight.bfloat16(), self.square[0].float(), self.vector.float())
z = self.fc2(x); F.batch_norm(y, self.vector, self.square[0], training=True); return z * self.vector
"""),
]

AXES = rows("""
# chains=(1, 1), rows=SQUARE
return self.fc0(x).transpose(1, 2).relu() * 2
return y.transpose(1, 2) + self.fc0(x).transpose(1, 2)
return torch.sub(self.fc0(x).transpose(1, 2), y.mT, alpha=2).tanh()
return y.mT + self.column * self.fc0(x).transpose(1, 2)
return self.fc0(x).permute(0, 2, 1) * self.gain
return self.fc0(x).relu().mT * self.column - self.gain
return self.fc0(x).mT * y[:, :1]
return self.fc0(x).mT * self.learned
return (self.fc0(x).mT * self.column).mT + y * self.column
z = self.fc0(x).mT; z += y.mT; z.relu_(); return z
return self.fc0(x).view(2, 2, 4, 8).permute(3, 0, 2, 1).sigmoid() * 3
return self.fc0(x).unsqueeze(0).permute(0, 1, 3, 2) + y.mT[None]
z = self.fc0(x).mT; return z[:, :, None].relu(), x
z = self.batch_norm(self.fc0(x).flatten(0, 1)); return z.view(2, 8, 8).mT * self.column
z = torch.sigmoid(self.fc0(x).mT); return z, z
# chains=(1, 0), rows=SQUARE
return self.fc0(x).mT + y
return y + self.fc0(x).mT
return self.fc0(x).mT * self.weight
return self.fc0(x).mT + y[0].mT.expand(2, 8, 8)
z = self.fc0(x); row = z.view(-1); t = z.mT.relu_(); return row, t
# chains=(0, 0), rows=SQUARE
z = self.fc0(x).mT; return z * self.column, z.sum(1)
return F.prelu(self.fc0(x).mT, self.column)
return self.fc0(x).mT[:, 1:] * 2, self.fc0(x).mT[:, ::2] + 1
return self.norm(self.fc0(x[0]).t())
# rows=SQUARE
z = self.fc0(x); t = z.mT; t.mul_(2); return z, t
# chains=(1, 1), rows=(8, 8, 8)
return y.mT + self.column * self.fc0(x).transpose(1, 2)
## A row of an operand for several of the product.
# chains=(1, 1), rows=(8, 4)
return self.fc0(x) * y[:, :1]
return x + y[:, 0].unsqueeze(1) * self.fc0(x)
return torch.tanh(self.fc0(x)) * (1 + y[:, :1]) + y.flip(0)[:, :1]
return self.fc0(x.reshape(-1, 8)).view(x.shape) * y[:, :1] + x
z = self.fc0(x.reshape(-1, 8)).view(2, 2, 4, 8); return z * y[:, :1, None] + x[:, :2].unsqueeze(2)
return self.fc0(x).transpose(1, 2) * y[:, 0].unsqueeze(2)
z = self.fc0(x); z *= y[:, 0][:, None]; return z.relu_()
a, b = torch.cat((y[:, 0], y[:, 1] + 1), -1).chunk(2, -1); return self.fc0(x) * b[:, None] + a[:, None]
return self.batch_norm(self.fc0(x.reshape(-1, 8))).view(x.shape) * y[:, :1]
# chains=(1, 1), says="is no operand", rows=(8, 4)
return self.fc0(x).relu() * 2 + x[:1]
# chains=(1, 1), says="is repeated along other axes", rows=(8, 4)
z = self.fc0(x.reshape(-1, 8)).view(x.shape) * y[:, :1]; return z.view(-1, 2, 8) * x.reshape(-1, 2, 8)[:, :1]
""")

GATES = rows("""
# sites=2
return F.silu(self.fc0(x)) * self.fc1(x)
return self.fc1(x) * F.silu(self.fc0(x))
h, z = F.gelu(self.fc0(x), approximate='tanh'), self.fc1(x); return F.dropout(h * z, 0.1, False)
return self.fc0(x) * torch.sigmoid(self.row(x))
return self.fc0(x) * self.row(x)
gate = self.row(x); return self.fc0(x) * gate
a, b = self.fc0(x), self.fc1(x); return a * b, b
a, b = self.fc0(x), F.silu(self.fc1(x)); return a * b, b
a, b = self.fc0(x), self.fc1(x); return a + torch.exp(0.5 * b), a, b
h, gate = F.relu(self.fc0(x)), torch.sigmoid(self.fc1(x)); return h * gate + x * (1 - gate)
return (torch.tanh(self.fc0(x)) * torch.sigmoid(self.row(x))).sum(0)
# sites=3
h = self.fc0(x); return F.relu(h * (1 + self.fc1(y)) + self.fc1(y + 1))
h = self.fc0(x); return F.relu(h * (1 + self.fc1(y[:1])) + self.fc1(y[1:2]))
a, b, r = F.relu(self.fc0(x)), F.relu(self.fc1(x)), torch.sigmoid(self.row(x)); return r * a + (1 - r) * b
a, b, r = self.fc0(x), self.fc1(x), torch.sigmoid(self.row(x)); return a * (b * r), r
a = F.relu(self.fc0(x).view(-1)) * self.fc1(x).view(-1); return a.view(-1, 8), self.fc1(y)
a, gate = self.fc0(x), torch.sigmoid(self.fc1(x)); return a * gate + self.fc1(gate)
return torch.sigmoid(self.fc0(x)) * 2 + self.fc0(x) + self.row(x)
# sites=4
return torch.lerp(self.fc0(x), y, self.row(y)), torch.addcmul(self.fc0(y), self.row(x), x)
""")

ROWS = [*SPELLINGS, *ENDS, *AXES, *GATES]
