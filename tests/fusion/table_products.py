"""Spellings of PyTorch's matrix products. A line is a forward of (self, x, y): see `table.py`."""

from __future__ import annotations

from tests.fusion.forwards import WIDTH
from tests.fusion.table import Row, rows

BARE = rows("""
# sites=1, axes=2
return torch.mm(x, self.weight).relu()
return torch.mm(input=x, mat2=self.weight).relu()
return torch.mm(x, self.weight, out=None).relu()
return x.mm(self.weight).relu()
return x.mm(mat2=self.weight).relu()
return torch.matmul(x, self.weight).relu()
return torch.matmul(other=self.weight, input=x).relu()
return x.matmul(self.weight).relu()
return torch.Tensor.matmul(x, self.weight).relu()
return x.__matmul__(self.weight).relu()
h = x; h @= self.weight; return h.relu()
return F.linear(weight=self.weight.t(), input=x, bias=None).relu()
# sites=0, axes=2
return self.weight.__rmatmul__(x).relu()
return torch.addmv(self.column[0].expand(len(x)), x, self.weight[:, 0]).relu()
return torch.addr(y, x[:, 0], self.weight[0]).relu()
return torch.linalg.matmul(x, self.weight).relu()
return torch.linalg.multi_dot([x, self.weight, self.weight.t()]).relu()
return torch.einsum("mk,kn->mn", x, self.weight).relu()
return torch.inner(x, self.weight.t()).relu()
return torch.tensordot(x, self.weight, 1).relu()
return (x[0] @ self.weight).relu()
return (x @ self.weight[:, 0]).relu()
# sites=0, says="it is written to out=", axes=2, learns="nothing"
return torch.mm(x, self.square, out=torch.empty_like(x)).relu()
return torch.matmul(x, self.square, out=torch.empty_like(x)).relu()
return torch.addmm(y, x, self.square, out=torch.empty_like(x)).relu()
""")

# What is added: a matrix, a row, columns, numbers. PyTorch takes a bias of one or two axes, and no column of numbers.
ADDED = ("y", "self.column", "self.column[None]", "y[:, :1]", "self.slope", "self.learned")
TAKEN = """
    torch.addmm({0}, x, self.weight)
    torch.addmm(mat2=self.weight, input={0}, mat1=x)
    torch.addmm({0}, x, self.weight, beta=1, alpha=1.0)
    torch.addmm({0}, x, self.weight, beta=0.5)
    torch.addmm({0}, x, self.weight, alpha=2)
    {0}.addmm(x, self.weight, alpha=0.5, beta=2)
    torch.addmm(beta=0.5, input={0}, mat1=x, mat2=self.weight)
    {0}.addmm(mat1=x, mat2=self.weight)
    F.linear(x, self.weight.t(), {0})
    F.linear(x, self.weight.t(), bias={0})
"""
LEFT = """
    torch.addmm({0}.detach() * torch.nan, x, self.weight, beta=0)
    torch.addmm({0}, x, self.weight, alpha=0)
    torch.addmm(0.5, {0}, x, self.weight)
    torch.addmm(0.5, {0}, x, mat2=self.weight)
    torch.addmm(0.5, {0}, 2.0, x, self.weight)
    {0}.addmm(0.5, x, self.weight)
    {0}.addmm(0.5, 2.0, x, self.weight)
    {0}.clone().addmm_(x, self.weight)
    {0}.clone().addmm_(x, self.weight, beta=0.5, alpha=2)
    {0}.clone().addmm_(0.5, 2.0, x, self.weight)
"""


def summed() -> list[Row]:
    """Each form of a product with something added, each with two of the summands."""
    made = []
    for sites, forms in ((1, TAKEN), (0, LEFT)):
        for number, form in enumerate(forms.split("\n")[1:-1]):
            is_written = "addmm_(" in form
            summands = ADDED[:1] if is_written else (ADDED[number % 6], ADDED[(number + 1 + number // 6) % 6])
            for summand in dict.fromkeys(summands):
                made.append(Row(f"return {form.strip().format(summand)}.relu()", sites=sites, axes=2))
    return made


# A product of each matrix of a batch: by one weight that is expanded, and by weights of their own, which stay.
OF_BATCHES = """
    torch.bmm(x, {0})
    torch.bmm(input=x, mat2={0})
    x.bmm({0})
    torch.matmul(x, {0})
    (x @ {0})
    torch.baddbmm(y, x, {0})
    torch.baddbmm(self.column, x, {0}, beta=0.5, alpha=2)
    torch.baddbmm(0.5, y[:, :1], x, {0})
    torch.baddbmm(0.5, y[:1], 2.0, x, {0})
    y.baddbmm(x, {0})
    y.clone().baddbmm_(x, {0}, beta=0.5)
    torch.addbmm(y[0], x, {0})
    torch.addbmm(0.5, y[0], 2.0, x, {0})
    y[0].addbmm(x, {0}, beta=0.5)
    y[0].clone().addbmm_(x, {0}, alpha=2)
"""
BATCHED = [
    Row(
        f"w = {weight}; return {form.strip().format('w')}.relu()",
        sites=int("expand" in weight and "add" not in form),
        rows=(WIDTH, WIDTH),
    )
    for weight in ("self.weight.expand(2, 8, 8)", "torch.stack((self.weight, self.square))")
    for form in OF_BATCHES.split("\n")[1:-1]
]

_TAKES_AS_LONG, _NO_FACTOR = "takes as long as to add it", "its alpha or beta is 0, or no number"
SKIPPED = rows("""
# sites=0, says="takes as long as to add it", rows=SQUARE
return F.linear(x, self.weight, y[:1]).relu()
# sites=0, says="is no operand", rows=SQUARE
return F.linear(x, self.weight, y[:1, :, :1]).relu()
# sites=1, rows=SQUARE, learns="parameters"
return F.linear(x, self.weight, y[:, :1]).relu()
return F.linear(x, self.weight, y).relu()
with torch.autocast('cpu', torch.bfloat16): return F.linear(x, self.weight, y[:, :1]).relu()
with torch.autocast('cpu', torch.bfloat16): return F.linear(x, self.weight, self.column.bfloat16()).relu()
# sites=0, says="is no operand", learns="parameters"
with torch.autocast('cpu', torch.bfloat16): return F.linear(x, self.weight, self.column.half()).relu()
# sites=0, says="it is in float64"
return (x.double() @ self.weight.double()).to(x.dtype)
# sites=0, says="it is in int64", learns="nothing"
return (x.long() @ self.weight.long()).to(x.dtype)
# sites=0, says="its alpha or beta is 0, or no number", axes=2
return torch.addmm(y, x, self.weight, alpha=0)
return torch.addmm(y.detach() * torch.nan, x, self.weight, beta=0)
""")

# Factors of a product with a vector, which is a bias where there are none.
FACTORS = [
    Row(f"return {form.strip().format('self.column')}.sigmoid()", sites=1, axes=2)
    for form in TAKEN.split("\n")
    if "alpha" in form or "beta" in form
]

ROWS = [*BARE, *summed(), *BATCHED, *SKIPPED, *FACTORS]
