"""Generated C does what ``Model`` does, bit for bit, and keeps its state over power cuts."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cabi import CSRC, TESTS, build_with_installed, run
from firmware import demo

import kbt_edge as kbt
from kbt_edge.cli import main
from kbt_edge.codegen import generate, toolchain
from kbt_edge.codegen import manifest as manifests
from kbt_edge.codegen.generated import Generated
from kbt_edge.errors import BundleError, DtypeError, NumericsError, RangeError, ShapeError
from kbt_edge.model import Model
from kbt_edge.studies import cartpole

pytest.importorskip("emx_onnx_cgen", reason="the C generator is not installed")
pytestmark = [
    pytest.mark.host_only("firmware is generated and compiled on a PC"),
    pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The policy of the firmware demo: the cart-pole's trunk and a head 16 → 32 → 1."""
    path = tmp_path_factory.mktemp("generated")
    generate(demo.make_bundle(path / "cartpole", hidden=32), path / "c")
    return path / "c"


@pytest.fixture(scope="module")
def compiled(folder: Path) -> Generated:
    return kbt.load_generated(folder)


@pytest.fixture
def policy(compiled: Generated) -> Generated:
    """As flashed: one build for all tests, each starts it anew."""
    compiled.restart()
    for slot in compiled.flash.slots:
        slot[:] = b"\xff" * len(slot)
    compiled.flash.budget = None
    return compiled


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes are measured once, for ``folder``: that takes as long as all the rest."""
    monkeypatch.setattr(toolchain, "measure", lambda folder: None)


def same(one: kbt.Prediction, other: kbt.Prediction) -> bool:
    return all(
        np.asarray(a, np.float64).tobytes() == np.asarray(b, np.float64).tobytes()
        for a, b in zip(one, other, strict=True)
    )


# ---- software in the loop --------------------------------------------------------------------------------------------


def test_over_1000_steps_the_generated_policy_equals_the_model_bit_for_bit(folder: Path, policy: Generated) -> None:
    model = Model.load(folder.parent / "cartpole", backend="compiled")
    states, forces = cartpole.sample_pairs(np.random.default_rng(0), 1000, cartpole.lqr_gain(cartpole.NEW), 1.0)
    for state, force in zip(states, forces, strict=True):
        assert same(model.predict(state), policy.predict(state))
        assert model.observe(force) == policy.observe(force)
    assert policy.samples == 1000
    assert policy.to_bytes() == model.head.to_bytes()


def test_two_loaded_policies_share_no_memory(folder: Path, policy: Generated) -> None:
    other = kbt.load_generated(folder)
    policy.update([1.0, 0.0, 0.1, 0.0], 5.0)
    assert (policy.samples, other.samples) == (1, 0)
    assert policy.to_bytes() != other.to_bytes()


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.slow("compiles the core")
def test_classes_of_several_rows_are_learned_as_the_model_learns_them(tmp_path: Path) -> None:
    """The token bundle: two inputs of ids, a softmax, several rows."""
    generate("tokens", tmp_path / "c")
    policy, model = kbt.load_generated(tmp_path / "c"), Model.load("tokens", backend="compiled")
    rng = np.random.default_rng(0)
    for step in range(20):
        ids = [rng.integers(0, spec.limit or 2, spec.shape) for spec in model.trunk.inputs]
        mine, its = policy.predict(*ids), model.predict(*ids)
        assert same(mine, its)
        labels = rng.integers(0, its.mean.shape[-1], its.mean.shape[:-1])
        if step % 2:
            assert policy.observe(labels) == model.observe(labels)
        else:
            one_hot = np.eye(its.mean.shape[-1])[labels]
            assert policy.observe(one_hot) == model.observe(one_hot)
    assert policy.to_bytes() == model.head.to_bytes()


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.slow("compiles the core")
def test_a_float64_head_with_two_outputs_and_an_offset_is_the_models(tmp_path: Path) -> None:
    trunk = (Path(kbt.__file__).parent / "bundles/cartpole/trunk.onnx").read_bytes()
    rng = np.random.default_rng(0)
    head = kbt.Head(rng.normal(size=(2, 16)), rng.normal(size=2), noise="adaptive", gate=200.0, dtype="float64")
    model = Model(trunk, head, input_mean=[0.1, 0, 0, 0], input_scale=[16, 12, 0.6, 1], output_offset=[3.0, -1.0],
                  output_scale=[20.0, 0.3], backend="compiled")  # fmt: skip
    model.save(tmp_path / "two_outputs")
    manifest = generate(tmp_path / "two_outputs", tmp_path / "c")
    assert (manifest["name"], manifest["dtype"]) == ("two_outputs", "float64")
    policy = kbt.load_generated(tmp_path / "c")
    statuses = set()
    for _ in range(200):
        x, y = rng.normal(size=4) * [16, 12, 0.6, 1], rng.normal(size=2) * [20, 0.3]
        assert same(model.predict(x), policy.predict(x))
        update = model.observe(y)
        assert policy.observe(y) == update
        statuses.add(update.status)
    assert policy.to_bytes() == model.head.to_bytes()
    assert "ok" in statuses


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.slow("compiles the core")
def test_extreme_units_are_those_of_the_model(tmp_path: Path) -> None:
    """From 1e-30 to 1e30: their squares do not fit into a float."""
    trunk = (Path(kbt.__file__).parent / "bundles/cartpole/trunk.onnx").read_bytes()
    head = kbt.Head(np.random.default_rng(0).normal(size=(2, 16)), noise_var=0.01)
    Model(trunk, head, output_scale=[1e-30, 1e30], backend="compiled").save(tmp_path / "units")
    generate(tmp_path / "units", tmp_path / "c")
    policy, model = kbt.load_generated(tmp_path / "c"), Model.load(tmp_path / "units", backend="compiled")
    x = np.array([0.1, -0.2, 0.3, -0.4])
    p, q = policy.predict(x), model.predict(x)
    assert same(p, q)
    assert np.isfinite(p.total_std).all()
    assert (p.std > 0).all()
    assert policy.observe([1e-30, 1e30]) == model.observe([1e-30, 1e30])


def test_c_of_an_older_format_is_not_loaded_but_replaced(folder: Path, tmp_path: Path) -> None:
    old = Path(shutil.copytree(folder, tmp_path / "c"))
    manifest = json.loads((old / "codegen.json").read_text())
    (old / "codegen.json").write_text(json.dumps({**manifest, "format": 1}))
    with pytest.raises(BundleError, match=r"another version of kbt-edge codegen .*generate it again"):
        kbt.load_generated(old)
    manifests.write(old, {}, manifest)
    assert [path.name for path in old.rglob("*") if path.is_file()] == ["codegen.json"]


def test_a_rejected_call_teaches_nothing(policy: Generated) -> None:
    before = policy.to_bytes()
    with pytest.raises(RangeError):
        policy.observe(1.0)  # nothing was predicted
    for bad in ([np.nan, 0, 0, 0], [0, np.inf, 0, 0], [0, 0, 1e300, 0]):
        with pytest.raises(NumericsError):
            policy.predict(bad)
    with pytest.raises(ShapeError):
        policy.predict([1.0, 2.0])
    policy.predict([0.1, 0.0, 0.0, 0.0])
    for bad_target in (np.nan, 1e300):
        with pytest.raises(NumericsError):
            policy.observe(bad_target)
    assert policy.to_bytes() == before
    assert policy.observe(1.0).status == "ok"  # the prediction was still there


def test_a_target_that_uses_the_policy_while_it_is_converted_is_rejected(policy: Generated) -> None:
    class Calling:
        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            policy.predict([9.0, 0.0, 0.0, 0.0])
            return np.array([1.0])

    policy.predict([0.1, 0.0, 0.0, 0.0])
    before = policy.to_bytes()
    with pytest.raises(RangeError, match=r"observe: .* another one now; pass a NumPy array"):
        policy.observe(Calling())  # type: ignore[arg-type]
    assert policy.to_bytes() == before


def test_a_number_is_a_target_for_one_output(policy: Generated) -> None:
    answers = set()
    for y in (2, 2.0, np.float32(2), np.int16(2), np.array(2.0), [2.0], np.array([2])):
        policy.restart()
        policy.predict([0.1, 0.0, 0.0, 0.0])
        answers.add((policy.observe(y), policy.to_bytes()))
    assert len(answers) == 1
    with pytest.raises(DtypeError, match="y: expected real numbers"):
        policy.update([0.1, 0.0, 0.0, 0.0], "2")
    with pytest.raises(DtypeError, match="input 'state': expected real numbers"):
        policy.predict("abcd")


# ---- flash -----------------------------------------------------------------------------------------------------------


def test_what_was_saved_is_there_after_a_restart(policy: Generated) -> None:
    with pytest.raises(BundleError, match="neither slot"):
        policy.load()
    policy.update([1.0, 0.0, 0.1, 0.0], 5.0)
    policy.save()
    learned = policy.to_bytes()
    policy.restart()
    assert policy.samples == 0
    policy.load()
    assert policy.to_bytes() == learned


def test_saves_go_to_the_slots_in_turns_and_the_newest_wins_even_when_its_number_wraps(policy: Generated) -> None:
    policy.update([1.0, 0.0, 0.1, 0.0], 5.0)
    for round_ in range(5):
        before = [bytes(slot) for slot in policy.flash.slots]
        policy.save()
        assert [bytes(slot) != old for slot, old in zip(policy.flash.slots, before, strict=True)] == [
            round_ % 2 == 0,
            round_ % 2 == 1,
        ]
        policy.update([1.0, 0.0, 0.1, 0.0], 5.0)
        samples = policy.samples
        policy.load()
        assert policy.samples == samples - 1
        policy.update([1.0, 0.0, 0.1, 0.0], 5.0)


def test_a_cut_save_leaves_the_state_before_it(policy: Generated) -> None:
    policy.update([1.0, 0.0, 0.1, 0.0], 5.0)
    policy.save()
    saved = policy.to_bytes()
    for budget in (0, 1, 20_000, 24_448, 24_449, 40_000, 48_800):
        policy.update([1.0, 0.0, 0.1, 0.0], 5.0)
        policy.flash.budget = budget
        with pytest.raises(BundleError, match="erase or write failed"):
            policy.save()
        policy.flash.budget = None
        policy.restart()
        policy.load()
        assert policy.to_bytes() == saved


def test_a_flipped_bit_in_the_newest_slot_brings_back_the_one_before(policy: Generated) -> None:
    states = []
    for _ in range(2):
        policy.update([1.0, 0.0, 0.1, 0.0], 5.0)
        policy.save()
        states.append(policy.to_bytes())
    policy.flash.slots[1][12_345] ^= 4
    policy.restart()
    policy.load()
    assert policy.to_bytes() == states[0]


@pytest.mark.parametrize(
    ("inputs", "hidden", "stride"), [(4, 0, 1), (8, 16, 1), (16, 32, 61)], ids=["linear", "small", "cart-pole"]
)
def test_a_power_cut_at_every_byte_leaves_the_old_state_or_the_new_one(
    inputs: int, hidden: int, stride: int, tmp_path: Path
) -> None:
    """Of the head of the cart-pole every 61st byte: all 48,897 take a minute (``power_cut 16 32 1``)."""
    program = build_with_installed(
        "cc", TESTS / "power_cut.c", tmp_path / "power_cut", f"-I{CSRC}/include", CSRC / "abi/store.c"
    )
    print(run(program, inputs, hidden, stride))


# ---- what is written -------------------------------------------------------------------------------------------------


def test_the_core_is_the_packages_own_to_the_byte(folder: Path) -> None:
    packed = {path.name: path.read_bytes() for path in (folder / "kbt").iterdir()}
    headers = {"kbt.h", "kbt_flight.h", "kbt_policy.h", "kbt_store.h", "head.hpp"}
    sources = {"kbt.cpp", "policy.c", "store.c", "recorder.cpp", "replay.cpp"}
    assert headers | sources | {"KbtEigen.cmake"} <= packed.keys()
    folders = [CSRC.parent / "cmake", *(CSRC / part for part in ("include", "core", "kernels", "abi"))]
    for name, content in packed.items():
        (source,) = [path / name for path in folders if (path / name).exists()]
        assert content == source.read_bytes()


def test_the_state_in_the_c_file_is_head_kbt_bit_for_bit(folder: Path) -> None:
    text = (folder / "cartpole_state.c").read_text()
    numbers = text[text.index("{") + 1 : text.index("}")].split(",")
    blob = bytes(int(number, 16) for number in numbers)
    assert blob == (folder.parent / "cartpole/head.kbt").read_bytes()


def test_the_readme_says_how_it_was_made_what_it_takes_and_how_to_call_it(folder: Path) -> None:
    text = (folder / "README.md").read_text()
    assert Model.load("cartpole").trunk.sha256 in text
    assert "cartpole_predict(x, mean, NULL, total_var)" in text
    assert f"{(folder.parent / 'cartpole/head.kbt').stat().st_size:,}" in text


def test_the_weights_are_constants_and_no_name_can_collide(folder: Path) -> None:
    objects = folder.parent / "trunk.o"
    run("cc", "-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-c", folder / "cartpole_trunk.c", "-o", objects)
    symbols = [line.split() for line in run("nm", objects).splitlines()]
    assert [name for *_, kind, name in symbols if kind.isupper() and kind != "U"] == ["cartpole_trunk_run"]
    assert not [name for *_, kind, name in symbols if kind in "bBdDC"]  # nothing of it is in RAM


def test_an_array_that_is_only_reshaped_is_not_copied(folder: Path) -> None:
    """The trunk has 18 Reshape nodes; their outputs are pointers."""
    text = (folder / "cartpole_trunk.c").read_text()
    assert len(re.findall(r"^ +float \(\*const tmp\w+\)", text, flags=re.M)) > 20
    assert "_reshape(" not in text


BAD_NAMES = [
    "",
    "9lives",
    "a-b",
    "Cart",
    "int",
    "while",
    "kbt",
    "kbt_x",
    "a__b",
    "_a",
    "a_",
    "x" * 33,
    "a;b",
    "é",
    "a\n",
    "math",
    "string",
    "errno",
    "pthread",
    "newlib",
    "m",
    "test",
]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_only_free_identifiers_become_c_names(name: str, tmp_path: Path) -> None:
    with pytest.raises(RangeError, match="name"):
        generate("cartpole", tmp_path / "c", name)
    assert not (tmp_path / "c").exists()


def headers(compiler: str) -> set[str]:
    """Names of the headers that a C or C++ source finds at the top level, as far as they could be names of a policy."""
    found = set()
    for language in ("c", "c++"):
        said = subprocess.run(
            [compiler, "-x", language, "-E", "-v", os.devnull], capture_output=True, text=True, check=True
        ).stderr
        listed = said.split("search starts here:")[-1].split("End of search list")[0]
        for folder in map(str.strip, listed.splitlines()):
            found |= {path.stem for path in Path(folder).glob("*.h")} if folder else set()
    return {name for name in found if re.fullmatch(r"[a-z][a-z0-9_]{0,30}[a-z0-9]|[a-z]", name)}


@pytest.mark.parametrize("compiler", ["cc", "arm-none-eabi-gcc"])
@pytest.mark.slow("compiles a policy for every header")
def test_a_policy_that_is_called_like_a_header_compiles_or_is_rejected(
    compiler: str, folder: Path, tmp_path: Path
) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    names = headers(compiler)
    assert {"math", "string", "time", "errno", "assert", "stdint"} <= names
    light = Path(shutil.copytree(folder, tmp_path / "light", ignore=shutil.ignore_patterns("*.cpp", "*.hpp", "*.md")))
    for part in ("trunk", "state"):  # what they include is what matters here
        source = light / f"cartpole_{part}.c"
        included = [line for line in source.read_text().splitlines() if line.startswith("#include")]
        source.write_text("\n".join([*included, "typedef int nothing;\n"]))
    compiled = 0
    for name in sorted(names):
        try:
            manifests.checked_name(name)
        except RangeError:
            continue
        renamed = Path(shutil.copytree(light, tmp_path / "c" / name))
        for path in list(renamed.glob("*.*")):
            text = path.read_text().replace("cartpole", name).replace("CARTPOLE", name.upper())
            path.unlink()
            path.with_name(path.name.replace("cartpole", name)).write_text(text)
        toolchain.build_objects(renamed, [compiler, "-fsyntax-only"], ["true"], ["-Werror"], [])  # its C sources
        compiled += 1
    assert compiled > 0


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.slow("compiles the core")
def test_the_sources_see_nothing_of_the_folder_but_by_quotes(folder: Path, tmp_path: Path) -> None:
    """Whatever the name: headers of the system are not looked for among the generated ones."""
    copy = Path(shutil.copytree(folder, tmp_path / "c"))
    for name in ("math.h", "string.h", "stdint.h", "cmath"):
        (copy / name).write_text("#error found\n")
    kbt.load_generated(copy)


def test_a_folder_of_someone_else_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("mine")
    with pytest.raises(BundleError, match="written by kbt-edge codegen"):
        generate("cartpole", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["precious.txt"]
    with pytest.raises(BundleError, match="written by kbt-edge codegen"):
        kbt.load_generated(tmp_path)


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.slow("compiles the core")
def test_the_command_writes_the_folder_and_its_own_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("first", "second"):
        assert main(["codegen", "cartpole", "-o", str(tmp_path / "c"), "--name", name, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["name"] == name
    assert (tmp_path / "c/second.h").exists()
    assert not (tmp_path / "c/first.h").exists()
    assert main(["codegen", "cartpole", "-o", str(tmp_path / "c")]) == 0
    assert "cartpole.h" in capsys.readouterr().out
    assert main(["codegen", "nowhere", "-o", str(tmp_path / "d")]) == 1
