"""Each built-in method shows itself on a few numbers, in its module docstring."""

from __future__ import annotations

import doctest
import sys

import pytest

from gcbench.core import registry

BUILT_IN = [name for name, entry in registry.compressors().items() if entry.source == "built-in"]


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_example_of_a_card_prints_what_it_says(name):
    module = sys.modules[registry.compressor_class(name).__module__]
    (card,) = [
        each
        for each in doctest.DocTestFinder().find(module)
        if each.name == module.__name__ and each.examples
    ]
    assert any("compress(" in example.source for example in card.examples)
    result = doctest.DocTestRunner(verbose=False).run(card)
    assert result.attempted >= 3
    assert result.failed == 0
