"""The prices at which the least of some planes is best_multipliers."""

from __future__ import annotations

import numpy as np
import pytest

from autopar.solver.search.cutting_planes import best_multipliers


def test_a_program_that_preprocessing_calls_abnormal_is_solved() -> None:
    """As a Llama of 8 layers gave it, in six digits; with its preprocessing GLOP solves it not."""
    bases = np.array([0.99976, 0.799272, 0.804032, 0.999632, 0.975182])
    slopes = np.array(
        [
            [-0.992366, -0.189994, -0.619296, 0.000342, -2.177921, -5.559725, -3.364188],
            [-0.794489, -0.189994, -0.458187, 0.000342, 4.065231, -5.559725, 2.676951],
            [-0.797279, -0.189994, -0.45926, 0.000342, 0.404993, -5.559725, -0.781274],
            [-0.992674, -0.189994, -0.619296, 0.000342, -2.177215, -5.559725, -3.363482],
            [-0.96825, -0.189994, -0.599291, 0.000342, -1.854439, -5.559725, -3.040706],
        ]
    )
    value, prices = best_multipliers(bases, slopes, np.array([1.0] * 4 + [9687.7] * 3))
    assert value == pytest.approx(float((bases + slopes @ prices).min()))
    assert value == pytest.approx(0.835052, abs=1e-5)


@pytest.mark.parametrize("seed", range(20))
def test_no_other_prices_are_higher(seed: int) -> None:
    draw = np.random.default_rng(seed)
    bases, slopes = draw.normal(size=6), draw.normal(size=(6, 4)) * 10.0 ** draw.integers(-3, 4, size=4)
    most = 10.0 ** draw.integers(-2, 4, size=4)
    value, prices = best_multipliers(bases, slopes, most)
    assert value == pytest.approx(float((bases + slopes @ prices).min()), rel=1e-6, abs=1e-6)
    assert (prices >= -1e-9).all()
    assert (prices <= most * (1 + 1e-9)).all()
    others = draw.uniform(size=(2000, 4)) * most
    assert float((bases + others @ slopes.T).min(axis=1).max()) <= value + 1e-6
