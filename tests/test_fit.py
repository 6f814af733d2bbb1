"""Constants of a device come back from times that were made with them. No clock is read."""

from dataclasses import replace

import numpy as np
import pytest

from examples import fit_device
from lab.simulator.cost_model import LayerMatrices, matrices, product_seconds
from lab.simulator.devices import A100
from lab.simulator.fit import COLUMNS, fit_products, product_errors, read_products
from model import GPTConfig
from tests.helpers import with_slow
from tests.test_cost_model import MATH, SMALL


@pytest.mark.parametrize("tile", with_slow([1, 32, 64, 128], fast=[1]))
def test_measured_times_give_back_the_device(tile):
    device = replace(A100, flops_per_s=180e12, bytes_per_s=1.2e12, tile=tile, op_s=8e-6)
    config = GPTConfig.preset("llama-7b")
    rng = np.random.default_rng(tile)
    sizes = [*range(1, 64, 3), *range(64, 1024, 24), *range(1024, 4097, 96)]
    tokens = rng.permutation(sizes)
    exact = [
        [product_seconds(device, int(n), *shape) for n in tokens] for shape in matrices(config)
    ]
    seconds = np.array(exact) * np.exp(rng.normal(0, 0.05, (4, len(tokens))))
    fitted = fit_products(replace(A100, name="new"), config, tokens, seconds)
    assert fitted.tile == tile
    assert fitted.flops_per_s == pytest.approx(180e12, rel=0.03)
    assert fitted.bytes_per_s == pytest.approx(1.2e12, rel=0.05)
    assert fitted.op_s == pytest.approx(8e-6, abs=4e-6)
    assert (fitted.name, fitted.memory_bytes) == ("new", 80e9)
    layer, _ = product_errors(fitted, config, tokens, seconds)
    assert np.median(layer) < 0.05


def test_product_errors():
    # MATH takes 1024, 512, 2048, 1024 us for four tokens, 4608 in all, and twice that for eight
    us = np.array([[2048, 4096], [512, 2048], [1024, 8192], [1024, 4096]])
    layer, each = product_errors(MATH, SMALL, np.array([4, 8]), us * 1e-6)
    assert layer == pytest.approx([0, 0.5])
    expected = np.array([[0.5, 0.5], [0, 0.5], [1, 0.5], [0, 0.5]])
    assert each == pytest.approx(expected, abs=1e-12)


def test_read_products(tmp_path):
    file = tmp_path / "profile.csv"
    columns = "mlp_down_proj,note,num_tokens,attn_pre_proj,attn_post_proj,mlp_up_proj"
    file.write_text(f"{columns}\n4,x,16,1,2,3\n8,,32,5,6,7\n")
    tokens, seconds = read_products(file)
    assert tokens.tolist() == [16, 32]
    # COLUMNS are in the order of the matrices
    assert LayerMatrices._fields == ("preproj", "postproj", "ffn_ln1", "ffn_ln2")
    assert seconds == pytest.approx(np.array([[1, 5], [2, 6], [3, 7], [4, 8]]) / 1e3)


HEADER = ",".join(["num_tokens", *COLUMNS])
ONCE = "must have each of num_tokens, attn_pre_proj, .* once"
MS = "a number of ms from 1e-6 to 1e9"
WRONG_LINES = {
    "1,1,1,1,": MS,
    "1,-1,1,1,1": MS,
    "1,1,1,nan,1": MS,
    "2,1,fast,1,1": MS,
    "1,1,1,1,1e-300": MS,
    "1,1e300,1,1,1": MS,
    "0,1,1,1,1": "a whole number of 1 to 1e9",
}
BAD = {
    f"{HEADER}\n1,1,1,1,1\n{line}\n": f"line 3: .* be {allowed}"
    for line, allowed in WRONG_LINES.items()
}
BAD[HEADER.replace(",mlp_up_proj", "") + "\n1,1,1,1\n"] = f"'mlp_up_proj' is 0 times .*: {ONCE}"


@pytest.mark.parametrize("content, message", BAD.items())
def test_a_bad_file_is_named_with_its_line_and_column(tmp_path, content, message):
    file = tmp_path / "profile.csv"
    file.write_text(content)
    with pytest.raises(ValueError, match=f"profile.csv.*{message}"):
        read_products(file)


EXTREME = {  # lines: each number is allowed, and nothing of all this may overflow or divide by zero
    "one row": ["1,1,1,1,1"],
    "one size, unlike times": ["16,1e-6,1e-6,1e-6,1e-6", "16,1e9,1e9,1e9,1e9"],
    "as small and as large as can be": ["1,1e-6,1e9,1e-6,1e9", "1e9,1e9,1e-6,1e9,1e-6"],
}


@pytest.mark.slow
@pytest.mark.parametrize("lines", EXTREME.values(), ids=EXTREME)
@pytest.mark.filterwarnings("error")
def test_extreme_times_end_in_a_table(tmp_path, capsys, lines):
    file = tmp_path / "profile.csv"
    file.write_text("\n".join([HEADER, *lines]))
    fit_device.main([str(file)])
    text = capsys.readouterr().out
    assert text.count("\n| ") == 5 and "nan" not in text and "inf" not in text
