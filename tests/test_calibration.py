"""Constants of a device come back from times that were made with them. No clock is read."""

from dataclasses import replace

import numpy as np
import pytest

from pretrained.presets import PRESETS
from simulator.calibration import COLUMNS, fit_products, product_errors, read_products
from simulator.cost_model import matrices, product_seconds
from simulator.devices import A100
from tests.test_cost_model import MATH, SMALL


@pytest.mark.parametrize("seed, tile", [(0, 1), (1, 32), (2, 64), (3, 128)])
def test_measured_times_give_back_the_device(seed, tile):
    device = replace(A100, flops_per_s=180e12, bytes_per_s=1.2e12, tile=tile, op_s=8e-6)
    config, noise = PRESETS["llama-7b"], np.random.default_rng(seed)
    tokens = noise.permutation([*range(1, 64, 3), *range(64, 1024, 24), *range(1024, 4097, 96)])
    times = {
        name: np.array([product_seconds(device, int(n), *shape) for n in tokens])
        * np.exp(noise.normal(0, 0.05, len(tokens)))
        for name, shape in matrices(config).items()
    }
    found = fit_products(replace(A100, name="new"), config, tokens, times)
    assert found.tile == tile
    assert found.flops_per_s == pytest.approx(180e12, rel=0.03)
    assert found.bytes_per_s == pytest.approx(1.2e12, rel=0.05)
    assert found.op_s == pytest.approx(8e-6, abs=4e-6)
    assert (found.name, found.memory_bytes) == ("new", 80e9)
    assert np.median(product_errors(found, config, tokens, times)["layer"]) < 0.05


def test_product_errors():
    # MATH takes 1024, 512, 2048, 1024 us for four tokens, 4608 in all, and twice that for eight
    us = ([2048, 4096], [512, 2048], [1024, 8192], [1024, 4096])
    times = {name: np.array(t) * 1e-6 for name, t in zip(matrices(SMALL), us)}
    errors = product_errors(MATH, SMALL, np.array([4, 8]), times)
    assert list(errors) == ["layer", *matrices(SMALL)]
    expected = [[0, 0.5], [0.5, 0.5], [0, 0.5], [1, 0.5], [0, 0.5]]
    assert np.array(list(errors.values())) == pytest.approx(np.array(expected), abs=1e-12)


def test_read_products(tmp_path):
    file = tmp_path / "profile.csv"
    columns = "mlp_down_proj,note,num_tokens,attn_pre_proj,attn_post_proj,mlp_up_proj"
    file.write_text(f"{columns}\n4,x,16,1,2,3\n8,,32,5,6,7\n")
    tokens, times = read_products(file)
    assert tokens.tolist() == [16, 32]
    assert list(times) == ["preproj", "postproj", "ffn_ln1", "ffn_ln2"]
    expected = np.array([[1, 5], [2, 6], [3, 7], [4, 8]]) / 1e3
    assert np.array(list(times.values())) == pytest.approx(expected)


HEADER = ",".join(["num_tokens", *COLUMNS])
MISSING = "must have the columns num_tokens and attn_pre_proj.*; there is no"
WRONG = {"0,1,1,1,1": "num_tokens='0'", "1.5,1,1,1,1": "num_tokens='1.5'"}  # a line: what it says
WRONG |= {"1,1,1,1,": "mlp_down_proj=''", "1,1,1": "mlp_up_proj=None"}
WRONG |= {"1,-1,1,1,1": "attn_pre_proj='-1'", "1,1,1,nan,1": "mlp_up_proj='nan'"}
WRONG |= {"1,1,1,1,inf": "mlp_down_proj='inf'", "2,1,fast,1,1": "attn_post_proj='fast'"}
BAD = {  # content -> what it says
    "": f"{MISSING} attn_post_proj, attn_pre_proj, mlp_down",
    HEADER.replace(",mlp_up_proj", "") + "\n1,1,1,1\n": f"{MISSING} mlp_up_proj$",
    HEADER + "\n": "no times after the header: must have at least one",
    "\xff\xfe" + HEADER: "must be CSV in UTF-8",  # in Latin-1
}
for line, says in WRONG.items():
    whole = "whole " if "num_tokens" in says else ""
    BAD[f"{HEADER}\n1,1,1,1,1\n{line}\n"] = f"line 3: {says}: must be a positive {whole}number"


@pytest.mark.parametrize("content, message", BAD.items())
def test_a_bad_file_is_named_with_its_line_and_column(tmp_path, content, message):
    file = tmp_path / "profile.csv"
    file.write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=f"profile.csv.*{message}"):
        read_products(file)
    for path in (tmp_path, tmp_path / "missing.csv"):
        with pytest.raises(OSError, match=path.name):
            read_products(path)
