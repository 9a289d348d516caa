"""`testbed simulate --compressor`: measured or read costs, its tables and its JSON."""

import json

import msgspec
import pytest

from testbed.base.errors import UsageError
from testbed.base.files import save_link
from testbed.base.link import Link
from testbed.commands.simulate import simulate as command
from testbed.prediction.codec import CodecCost, CodecSample, RoundCost, encode_codecs, load_codecs
from testbed.records.simulation import Simulation

LINK = Link(backend="mpi-ring", num_workers=4, latency_s=1e-3, seconds_per_byte=1.2e-7)


def cost(compressor, share, seconds_per_element, ratio=None):
    samples = tuple(
        CodecSample(
            num_elements=n,
            compute_s=(seconds_per_element * n,) * 2,
            rounds=(RoundCost(form="gather", num_bytes=4 * n * share),),
        )
        for n in (1000, 2000)
    )
    return CodecCost(compressor=compressor, num_workers=4, ratio=ratio, samples=samples)


@pytest.fixture
def folder(tmp_path):
    save_link(LINK, tmp_path / "link.json")
    costs = [cost("ef+topk:ratio=0.01", 0.02, 1e-9, 0.01), cost("qsgd", 0.13, 1e-5)]
    (tmp_path / "codecs.json").write_bytes(encode_codecs(costs))
    return tmp_path


@pytest.fixture
def simulate(folder, capsys):
    """`testbed simulate` of ResNet-50 on the link; returns what it printed."""

    def run(scheduler, **options):
        command(trace="resnet50-v100", link=folder / "link.json", scheduler=scheduler, **options)
        return capsys.readouterr().out

    return run


def test_costs_from_a_file_give_tables_and_json(folder, simulate):
    found_path = folder / "found.json"
    text = simulate(
        "wfbp,mg-wfbp,lags", codecs=folder / "codecs.json", break_even=True, json=str(found_path)
    )
    found = msgspec.json.decode(found_path.read_bytes(), type=Simulation)
    shown = {(r.compressor, r.scheduler): r for r in found.compressed}
    # `lags` gives messages ratios, and qsgd has none.
    assert sorted(shown) == [
        ("ef+topk:ratio=0.01", "lags"),
        ("ef+topk:ratio=0.01", "mg-wfbp"),
        ("ef+topk:ratio=0.01", "wfbp"),
        ("qsgd", "mg-wfbp"),
        ("qsgd", "wfbp"),
    ]
    topk = shown["ef+topk:ratio=0.01", "mg-wfbp"]
    assert topk.sent_bytes == pytest.approx(0.02 * topk.dense_bytes)
    assert topk.speedup > 5
    topk_pays, qsgd_pays = found.pays
    assert topk_pays.pays == "below"
    assert topk_pays.gain > 4
    # qsgd needs 250 s to encode 25 million elements: it pays where dense needs more than that.
    assert qsgd_pays.gain < 0
    assert qsgd_pays.seconds_per_byte > LINK.seconds_per_byte > topk_pays.seconds_per_byte
    for words in ("to best dense", "pays", "codecs.json, at 1 x that speed, beside backward"):
        assert words in text


def test_a_faster_codec_pays_at_more_bandwidth(folder, simulate):
    found = []
    for speed in (1.0, 100.0):
        options = {"codecs": folder / "codecs.json", "codec_speed": speed, "compressor": "qsgd"}
        text = simulate("wfbp", **options, break_even=True, json="-")
        found.append(json.loads(text)["pays"][0]["seconds_per_byte"])
    assert found[1] < found[0] / 10


def test_costs_are_measured_and_saved(folder, simulate):
    text = simulate("wfbp", compressor="fp16", codecs_out=folder / "new.json")
    assert "fp16" in text
    (measured,) = load_codecs(folder / "new.json")
    assert (measured.compressor, measured.num_workers) == ("fp16", 4)
    assert [r.num_bytes for r in measured.samples[0].rounds] == [2 * 1024]


def test_without_compressors_nothing_is_said_of_them(simulate):
    assert "compressed" not in json.loads(simulate("wfbp", json="-"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compressor": "nosuch"}, "no compressor 'nosuch'"),
        ({"compressor": ""}, "--compressor names none"),
        ({"codec_speed": 10.0}, "give --compressor too"),
        ({"codecs": "codecs.json", "compressor": "fp16"}, "has no cost of 'fp16' for 4"),
        ({"codecs": "codecs.json", "codec_speed": 0.0}, "expected above 0"),
        ({"compressor": "fp16", "workers": "2:1024"}, "at most 64, not 1024"),
    ],
)
def test_what_cannot_be_is_refused(folder, simulate, options, message):
    if "codecs" in options:
        options = {**options, "codecs": folder / options["codecs"]}
    with pytest.raises(UsageError, match=message):
        simulate("wfbp", **options)
