"""Writes, modes, halves, copies, transforms. A line is a forward of (self, x, y): see `table.py`."""

from __future__ import annotations

from collections.abc import Iterator

from tests.fusion.table import SQUARE, Row, rows

WRITES = rows("""
## Chains onto a tensor of the graph that nothing else reads.
# chains=(1, 1)
h = x * 2; h += self.fc0(x); return h
h = x.sin(); return h.add_(self.fc0(x).relu(), alpha=2)
h = x + 1; z = h.sum(); h *= self.fc0(x); return h, z
h = (x + 1).view(-1).view(x.shape); h -= self.fc0(x); return h
h = torch.relu(self.fc0(x)); h /= 2.0; return h
# chains=(2, 2), learns="parameters"
h = torch.zeros_like(x); h += self.fc0(x); h += self.fc1(x); return torch.sigmoid(h)
# chains=(1, 1), learns="parameters"
h = x + 1; h += self.fc0(x); z = h.view(-1); h.mul_(2); return h, z
# chains=(1, 0), learns="parameters"
h = x + 1; z = h.view(-1); h += self.fc0(x); return h, z
h = x + 1; z = h.add_(self.fc0(x)); return h * 2, z
h = x.bfloat16(); h += self.fc0(x); return h.float()
# chains=(1, 0), backends=("eager",)
h = x + 1; z = F.dropout(h, 0.1, False); z += self.fc0(x); return h, z * 1
h = x + 1; z = F.dropout(h, 0.1, False); h += self.fc0(x); return h * 1, z
# rows=SQUARE, learns="nothing"
x += self.fc0(x); return x
self.square += self.fc0(x).detach()[0]; return self.square * 1
h = torch.cat([x, x + 1]); a, b = h.chunk(2); a += self.fc0(x); return h, b
h = torch.cat([x, x + 1]); a, b = h.split(len(x)); a.mul_(2); b.add_(self.fc0(x)); return h
h = x[:1].clone().expand(2, 8, 8).contiguous(); z = h[:, :4]; h += self.fc0(x); return h, z
## All that has the memory is returned: a write that is lost, done twice or done at another time shows.
# learns="parameters"
h = self.fc0(x); skip = h; h += 1.0; return torch.relu(self.fc1(h)) + skip
h = self.fc0(x); kept = h; h += 2.0 * torch.sigmoid(h); return h, kept
h = self.fc0(x); kept = h; h *= self.vector; return self.fc1(h), kept
h = self.fc0(x); vector = self.vector; vector += 1.0; return h * self.vector
h = torch.relu(self.fc0(x)); kept = h; h /= 2.0; return self.fc1(h), kept
h = torch.relu(self.fc0(x)) / 2.0; kept = h; h += y; return self.fc1(h), kept
h = self.fc0(x); kept = h; h += h; return torch.relu(h), kept
h = self.fc0(x); row = h.view(-1); torch.relu_(h); return row * 2
h = self.fc0(x); kept = self.same(h); h += 1.0; return torch.relu(self.fc1(h)), kept
h = self.fc0(x); pair = [h, h]; pair[0] += 1.0; pair[1] += 1.0; return torch.relu(self.fc1(h)), *pair
def add(z): z += 1.0; h = self.fc0(x); add(h); return torch.relu(self.fc1(h)), h
h = 0; h += self.fc0(x); kept = h; h += x; return torch.relu(self.fc1(h)), kept
n, s = len(x), x.shape; m = n; n *= 2; s += (1,); return self.fc0(x).relu().view(s)[..., 0] * n + m
h = self.two(self.fc0(x)); kept = h; h += [y]; return torch.relu(self.fc1(kept[0])) + kept[2], h[2]
h = self.fc0(x); kept = h; h.add_(1.0).mul_(y); h[0].zero_(); return torch.relu(self.fc1(h)), kept
self.vector.add_(self.fc0(x).detach().sum((0, 1))); y.clamp_(max=2.0); return self.fc1(y) * self.vector
h = self.fc0(x); kept = h; F.relu(h, True); y.sigmoid_(); F.dropout(h, 0.5, False, True); return h * y, kept
h = self.fc0(x); kept = h; self.act(h); self.act(y); return torch.relu(self.fc1(h)), kept, self.net(y), y
h = torch.zeros_like(x); learns = h.requires_grad; h += torch.relu(self.fc0(x)); return h * learns, h
c = self.count(x); was = c.value; c.grow(); return torch.relu(self.fc0(x)) * was, y + c.value
self.vector += 1.0; return torch.relu(self.fc0(x)) * self.vector
h = self.fc0(x); kept = h; h[...] = y; return torch.relu(self.fc1(h)), kept
h = self.fc0(x); kept = h; h[0] += 1.0; return torch.relu(self.fc1(h)), kept
self.vector[:2] = x.sum(); return torch.relu(self.fc0(x)) * self.vector
y[:, 1:3] *= 2.0; return torch.relu(self.fc0(y))
r = y * 2.0; z = self.fc0(x) + r; r += 1.0; return z, r
torch.add(self.fc0(x).detach(), 1.0, out=y); torch.mul(self.vector, 2.0, out=self.vector); return y * 1
w = self.weight.detach() * 2; t = w.t(); w.mul_(2); return torch.relu(x @ t)
# sites=0, says="another shape in place", learns="parameters"
h = torch.relu(self.fc0(x)); s, t = h.shape, h.mT; h.unsqueeze_(0); h.transpose_(1, 2); return h.reshape(s), t
## What the sum reads is written between it and the product.
# chains=(1, 0), learns="parameters"
z = self.fc2(x); self.vector.mul_(3); return torch.relu(z + self.vector)
z = self.fc2(x); self.vector[0] = 3.0; return torch.relu(z + self.vector)
z = self.fc2(x); torch.add(self.vector, 1, out=self.vector); return torch.relu(z + self.vector)
z = self.fc2(x); torch._foreach_mul_([self.vector], 3.0); return torch.relu(z + self.vector)
z = self.fc2(x); torch.ops.aten.mul_(self.vector, 3); return torch.relu(z + self.vector)
z = self.fc2(x); torch.ops.aten.mul_.Scalar(self.vector, 3); return torch.relu(z + self.vector)
z = self.fc2(x); torch.ops.epigemm_tests.write(self.vector); return torch.relu(z + self.vector)
z = self.fc2(x); F.relu(self.vector.sub_(0.5), True); return torch.relu(z + self.vector)
z = self.fc2(x); F.dropout(self.vector, 1.0, True, True); return torch.relu(z + self.vector)
z = self.fc2(x); F.silu(self.vector, inplace=True); return torch.relu(z + self.vector)
z = self.fc2(x); self.vector.view(2, -1).mul_(3); return torch.relu(z + self.vector)
z = self.fc2(x); self.vector.copy_(self.vector * 2); return torch.relu(z + self.vector)
""")

# Augmented assignments: what stands before, what is written, and all that has its memory; and the right sides.
PLACES = """
pass | h | h
kept = h | h | h, kept
kept = h | kept | h, kept
view = h.view(-1) | h | h, view
row = h[0] | row | h, row
rows = h[1:] | rows | h, rows
buffer = self.vector | buffer | h, buffer, self.vector
row = self.square[0] | row | h, row, self.square
kept = y | y | h, y, kept
row = y[0] | row | h, y, row
data = y.data | data | h, y, data
kept = z = y | y | h, y, kept
"""
OF_FLOATS = (
    "+= 2 | -= self.vector | *= z.sum(0).abs() + 1 | /= 2 | //= self.vector | %= 2 | **= 2 | @= self.square"
)
OF_INTEGERS = "&= 2 | |= 3 | ^= 5 | <<= 2 | >>= z.sum(0).abs() % 5"


def augmented() -> Iterator[Row]:
    """Each place with three of the operators, each operator of integers with one place."""
    places = [line.split(" | ") for line in PLACES.strip().splitlines()]
    floats = OF_FLOATS.split(" | ")
    pairs = [
        (place, floats[(number * 3 + step) % 8], "")
        for number, place in enumerate(places)
        for step in range(3)
    ]
    pairs += [
        (places[1 + number % 5], each, ".int()") for number, each in enumerate(OF_INTEGERS.split(" | "))
    ]
    for (before, target, seen), write, cast in pairs:
        last = f"torch.relu(self.fc1(h{'.float()' * bool(cast)})) + torch.relu(self.fc0(y))"
        source = f"z = h = self.fc0(x){cast}; {before}; {target} {write}; last = {last}; return last, {seen}"
        yield Row(source, rows=SQUARE, axes=2, learns="parameters")


MODES = rows("""
# sites=2, learns="parameters"
with torch.no_grad(): z = self.fc0(x); h = torch.relu(z); return self.fc1(h) + h
with torch.no_grad(): t = torch.sigmoid(self.fc0(x)); t *= self.fc1(x).flip(-1); return t
# sites=1, learns="parameters"
z = self.fc0(x); return torch.relu(z.detach()) * 2 + z
z = self.fc0(x); with torch.no_grad(): t = y * 2; return torch.relu(z) + t
z = self.fc0(x); with torch.no_grad(): r = torch.relu(z); return r / 2 + z
with torch.no_grad(): t = self.weight.t(); return torch.relu(x @ t + self.column)
t = self.weight.t(); with torch.autocast('cpu', torch.bfloat16): z = x @ t; return torch.relu(z)
with torch.autocast('cpu', torch.bfloat16): z = torch.relu(x @ self.weight) / 2; return z
with torch.autocast('cpu', torch.bfloat16): z = self.fc2(x); return torch.relu(z).float() + z * self.column
""")

_TWO = " its halves are two products, of which one multiplies by the other"
HALVES = rows("""
# sites=2, says=" its halves are two products, of which one multiplies by the other", learns="parameters"
a, b = self.wide(x).chunk(2, dim=-1); return F.silu(a) * b
a, b = torch.chunk(self.wide(x), 2, -1); return a * F.gelu(b)
a, b = self.wide(x).split(8, -1); return F.gelu(a, approximate='tanh') * b
a, b = torch.tensor_split(self.wide(x), 2, -1); return b * torch.sigmoid(a)
z = self.wide(x); return torch.tanh(z[..., :8]) * z[..., 8:]
z = self.wide(x); return z[..., :8] * torch.sigmoid(z[..., :8]) * z[..., 8:]
z = self.wide(x); return F.relu(z.narrow(-1, 8, 8)) * z.narrow(-1, 0, 8)
a, b = self.wide(x).unflatten(-1, (2, 8)).unbind(-2); return F.silu(a) * b
return F.glu(self.wide(x))
return F.glu(self.wide(x), x.dim() - 1) + 1
a, b = F.linear(x, self.wide.weight).chunk(2, -1); return a * b
a, b = self.wide(x).chunk(2, -1); a, b = a.clamp(max=1.0), b.clamp(-1.0, 1.0); return (b + 1) * a.sigmoid()
a, b = self.wide(x).chunk(2, -1); return F.silu(a.view(-1, 8)) * b.view(-1, 8)
a, b = self.wide(x).chunk(2, -1); return F.dropout(F.silu(a) * b, 0.5, False) + x[..., :1]
a, b = self.wide(x).chunk(2, -1); return a + torch.exp(0.5 * b)
# sites=4, says=" its halves are two products, of which one multiplies by the other", learns="parameters"
return F.glu(self.wide(F.glu(self.wide(x), -1)), -1)
# sites=1, learns="nothing"
a, b = self.wide(x).chunk(2, -1); seen = a.view(a.shape); a.mul_(2); return seen * b
# sites=1, learns="parameters"
z = self.wide(x); a, b = z.chunk(2, -1); return F.silu(a) * b, z
a, b = self.wide(x).chunk(2, -1); return F.silu(a) * b, b
z = self.wide(x); a, b = z.chunk(2, -1); return F.silu(a) * b + z.sum()
a, b = self.wide(x).chunk(2, -1); return F.silu(a) * b * a.sum(-1, keepdim=True)
a, b = self.wide(x).chunk(2, -1); return F.silu(a.reshape(-1)) * b.reshape(-1)
z = self.wide(x); return F.silu(z[..., :8], inplace=True) * z[..., 8:]
a, b = self.wide(x).chunk(2, -1); return F.softmax(a, -1), b.relu()
z = self.wide(x); return F.silu(z[..., 1:9]) * z[..., :8]
z = self.wide(x); return F.silu(z[..., ::2]) * z[..., 1::2]
a, b = self.wide(x).chunk(2, 0); return F.silu(a) * b
return F.glu(self.wide(x), 0)
z = self.wide(x); return F.glu(z, -1) + F.glu(z, -1)
z = self.wide(x); a, b = z.chunk(2, -1); return F.glu(z, -1) + a * b
return F.silu(self.wide(x)[..., :8]) * x[..., :1]
a, b = (x @ self.tall).chunk(2, -1); return F.silu(a) * b
""")

_ONCE = "is copied once"
COPIES = rows("""
# says="is copied once", rows=SQUARE
return self.block(self.block(self.block(y.mT))).sum(1)
return self.norm(self.block(self.block(y.mT + self.weight))), x
z = y.mT + self.column * F.dropout(self.fc0(y).relu(), 0.5, False); return self.block(z).contiguous() * 1
z = self.block(self.block(y.mT)); a, b = z.chunk(2, 1); return torch.cat([b, a], 1), z.reshape(-1).sum(0)
b = self.block; z = b(b(b(b(b(y.mT))))); return z, z.contiguous(), z.sum(1)
# says_not="is copied once", rows=SQUARE
b = self.block; z = b(b(b(b(y.mT)))); return z, z.mT
return self.block(self.block(y.mT))
z = self.block(self.block(y.mT)); return z.sum(1), z[:, 0]
return self.block(y.mT).sum(1)
z = self.block(self.block(y.mT)); kept = z.contiguous(); kept.add_(1); return z.sum(1), kept * 1
z = self.block(self.block(y.mT)); t = z.mT.reshape(2, -1); t.add_(1); return z.sum(1), t.sum(1)
z = self.block(self.block(y.mT)); return z.as_strided((2, 4), (64, 1)) * 1
z = y.mT + self.fc0(y).mT; z = self.block(z); z = z + self.fc0(z.mT).mT; return self.block(z).sum(1)
# says_not="is copied once", rows=SQUARE, backends=("eager",)
torch.manual_seed(3); z = F.dropout(self.block(self.block(y.mT)), 0.5, True); return z.sum(1)
""")

_INSIDE = "it is inside of a transform"
TRANSFORMS = rows("""
# sites=1
return torch.vmap(lambda row: row * 2 + row.sum())(F.relu(self.fc0(x)))
h = self.fc0(x); torch.vmap(lambda row: row.mul_(2))(h); return F.relu(h)
r, h = x * 2, self.fc0(x); torch.vmap(lambda row: row.mul_(2))(r); return F.relu(h) + r
# sites=1, says="it is inside of a transform", rows=(3, 3)
return F.relu(self.fc1(torch.vmap(self.fc0)(x)))
return torch.vmap(lambda row: row * F.relu(self.fc0(x)).sum())(x) + F.relu(self.fc1(x))
return F.relu(self.fc0(x)) + torch.func.grad(lambda z: self.fc0(z).tanh().sum())(x)
return torch.vmap(torch.func.grad(lambda z: F.relu(self.fc1(z)).sum()))(F.relu(self.fc0(x)))
return torch.func.jacrev(lambda z: F.relu(self.fc1(z)).sum((0, 1)))(F.relu(self.fc0(x))).sum(1)
# sites=2
h = F.relu(self.fc0(x)); g = torch.func.grad(lambda z: (h * z.tanh()).sum())(h); return F.relu(self.fc1(g)) * h
# sites=2, says="it is inside of a transform"
h = F.relu(self.fc0(x)); v, t = torch.func.jvp(lambda z: F.gelu(self.fc1(z)), (h,), (x,)); return F.relu(self.fc1(v)) * t
# sites=0, says="it is inside of a transform", backends=("eager",)
with self.dual_level(): return F.relu(self.unpack(F.relu(self.fc0(self.dual(x, x * 2)))).tangent)
""")  # noqa: E501

ROWS = [*WRITES, *augmented(), *MODES, *HALVES, *COPIES, *TRANSFORMS]
