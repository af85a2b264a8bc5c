"""Statistics of tensors against numpy on the whole tensor: every dtype, several windows, numbers that are none."""

import ml_dtypes
import numpy as np
import pytest

from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.storage.local import LocalStorage
from holdfast.web import tensor_windows
from holdfast.web.open_steps import OpenStep
from holdfast.web.page_jobs import JobStop, PageJob
from holdfast.web.tensor_statistics import statistics
from tests.web.sample_runs import write_step

RANDOM = np.random.default_rng(0)
TENSORS = {
    "float32": RANDOM.normal(3, 2, (300, 70)).astype(np.float32),
    "bfloat16": RANDOM.normal(size=(50, 60)).astype(ml_dtypes.bfloat16),
    "float8": RANDOM.normal(size=999).astype(ml_dtypes.float8_e4m3fn),
    "float64": RANDOM.normal(1e8, 0.1, 5000),
    "int64": RANDOM.integers(-5, 5, (7, 8, 9)),
    "bool": RANDOM.integers(0, 2, 100).astype(bool),
    "empty": np.zeros((0, 5), np.float32),
    "scalar": np.array(2.5, np.float32),
    "equal": np.full(1000, 7.0, np.float32),
    "nan": np.array([np.nan, 1.0, np.inf, -np.inf, 0.0, 3.0], np.float32),
    "none": np.full(5, np.nan, np.float32),
    "wide": np.array([-1.7e308, 1.7e308]),
}


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    root = tmp_path_factory.mktemp("statistics")
    write_step(root, 1, {"model": TENSORS})
    return OpenStep(Checkpoint(LocalStorage(root), "step-000000000001"))


def computed(opened, *keys):
    return {row["key"]: row for row in statistics(PageJob("", 100), opened, "model", keys)["tensors"]}


@pytest.mark.parametrize("window", [7, 4096, 1 << 20])
def test_they_are_those_of_numpy(opened, monkeypatch, window):
    monkeypatch.setattr(tensor_windows, "WINDOW_ELEMENTS", window)
    rows = computed(opened, *TENSORS)
    for key, tensor in TENSORS.items():
        row, values = rows[key], tensor.astype(np.float64).reshape(-1)
        finite = values[np.isfinite(values)]
        assert (row["nan"], row["inf"]) == (np.isnan(values).sum(), np.isinf(values).sum()), key
        assert row["zeros"] == (finite == 0).sum()
        if not finite.size:
            assert (row["min"], row["mean"], row["histogram"]) == (None, None, None)
            continue
        assert (row["min"], row["max"]) == (finite.min(), finite.max())
        if key == "wide":
            continue
        np.testing.assert_allclose(row["mean"], finite.mean(), rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(row["std"], finite.std(), rtol=1e-6, atol=1e-9)
        np.testing.assert_allclose(row["norm"], np.linalg.norm(finite), rtol=1e-12)
        if row["histogram"] is not None:
            assert sum(row["histogram"]["counts"]) == finite.size
            expected, _ = np.histogram(finite, row["histogram"]["edges"])
            assert row["histogram"]["counts"] == expected.tolist()


def test_a_damaged_block_has_no_statistics(tmp_path):
    path = write_step(tmp_path, 1, {"model": {"a": np.ones(10, np.float32)}})
    file = path / "model-00001-of-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    row = computed(OpenStep(Checkpoint(LocalStorage(tmp_path), path.name)), "a")["a"]
    assert "digest" in row["problem"]
    assert "mean" not in row


def test_late_statistics_are_partial_and_cancelled_ones_none(opened):
    late = PageJob("", -1.0)
    assert statistics(late, opened, "model", ["float32", "int64"]) == {"tensors": [], "partial": True}
    cancelled = PageJob("", 100)
    cancelled.cancel()
    with pytest.raises(JobStop):
        statistics(cancelled, opened, "model", ["float32"])
