"""What no number is agrees with nothing."""

from math import inf, nan

import torch

from tests.gaps import number
from tests.ranks import relative
from tests.runtime.training import gap


def test_nothing_is_close_to_what_is_no_number() -> None:
    good, bad = torch.ones(3), torch.tensor([1.0, nan, 1.0])
    assert (number(0.5), number(nan), number(torch.tensor(nan))) == (0.5, inf, inf)
    for compare in (gap, relative):
        assert compare(good, good) == 0
        assert compare(bad, good) == compare(good, bad) == inf
        assert max(0.0, compare(bad, good)) == max(compare(bad, good), 0.0) == inf
