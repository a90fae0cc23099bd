"""What the library offers, by name."""

from __future__ import annotations

import pytest

from epigemm.epilogues import library
from epigemm.epilogues.registry import EPILOGUES


@pytest.mark.parametrize("name", sorted(EPILOGUES))
def test_functors_of_csrc_by_their_names(name: str) -> None:
    epilogue = EPILOGUES[name]
    assert library.named(name) is epilogue and epilogue.is_compiled and epilogue.prelinked == name
    assert (epilogue.bias_place == 1) == (epilogue.operands[:1] != () and epilogue.operands[0].name == "bias")


@pytest.mark.parametrize("name", sorted(library.FUNCTIONS))
def test_others_are_found_by_the_forms_of_their_operands(name: str) -> None:
    count = len(library.FUNCTIONS[name].operands)
    found = library.named(f"{name}.{'1' * count}")
    assert found is not None and not found.is_compiled and found.bias_place == 0, (
        "a bias in fp32 cannot be left out"
    )
    usual = library.named(f"{name}.{'0' * count}")
    assert usual is not None and usual.bias_place == 1 and usual is library.named(usual.name)
    assert (
        library.named(f"{name}.{'0' * (count + 1)}")
        is library.named(f"{name}.")
        is library.named(name)
        is None
    )
