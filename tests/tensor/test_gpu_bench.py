"""The benchmark for GPUs, on the CPU's provider: what can be known before a GPU is at hand."""

import json

from bench import gpu


def test_the_dry_mode_proves_parity_and_measures_both_renderings(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "SIZES", (10, 500))
    monkeypatch.setattr(gpu, "SECONDS_A_SIZE", 0.02)
    file = tmp_path / "input" / "gpu.npz"
    assert gpu.main(["prepare", str(file)]) == 0
    assert gpu.main(["measure", str(file), "--dry"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["state"] == "dry"
    assert max(result["parity"]["tree_ensemble"], result["parity"]["tensor"]) <= 1e-4
    assert [line["rows"] for line in result["speed"]] == [10, 500]
    assert all(line[side]["rows_per_s"] > 0 for line in result["speed"] for side in ("cpu", "device"))


def test_without_cuda_the_state_is_not_run_and_says_why(tmp_path, capsys):
    file = tmp_path / "gpu.npz"
    assert gpu.main(["prepare", str(file)]) == 0
    assert gpu.main(["measure", str(file)]) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["state"] == "not run"
    assert "CUDAExecutionProvider" in result["reason"]
