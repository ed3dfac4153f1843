"""The model: a frozen trunk in front of a learning head, in physical units.

    model = Model.load("cartpole")
    p = model.predict(x)        # runs the trunk once
    model.observe(y)            # learns the target of that prediction, without running it again
    model.save("cartpole")

The scaling between physical units and those of the network is part of the model. Its arithmetic is kbt_policy.h, which
generated C uses as well. This module checks arguments and explains errors.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from kbt_edge import _core
from kbt_edge import bundle as bundles
from kbt_edge._arrays import Array, cast, check_finite, check_real, plain_array, shape_error
from kbt_edge._files import read_bounded
from kbt_edge._samples import must_be_latest, raise_rejection, sample_noise, targets
from kbt_edge.bundle import Bundle
from kbt_edge.errors import BundleError, NumericsError, RangeError, ShapeError
from kbt_edge.head import Head, Prediction, Update
from kbt_edge.onnxfile import MAX_BYTES
from kbt_edge.scaling import Scaling, check_scaled, log_scale_of, numbers, per_output, scaled_inputs, scaled_noise
from kbt_edge.trunk import Backend, Trunk

__all__ = ["Model"]

Inputs = npt.ArrayLike | Sequence[npt.ArrayLike] | Mapping[str, npt.ArrayLike]


class Model:
    """A trunk, a head, and the scaling around them. One object belongs to one thread.

    A copied or unpickled model has its own head and trunk. It has no prediction to observe and no folder to save to.

    trunk           the ONNX file: its path or its bytes
    head            the ``Head`` that reads the trunk's rows
    input_mean      the trunk gets (x - input_mean) / input_scale: a number, or one per feature (the last axis of x);
    input_scale     for several inputs a dict by name. Token ids are not scaled
    output_offset   y = output_offset + output_scale · u, with u the head's output: a number, or one per output.
    output_scale    Probabilities (softmax) are not scaled
    made            how the model was made, as short texts; kept in the bundle
    backend, providers, cache_dir, max_bytes   how the trunk runs, see ``Trunk``
    """

    def __init__(
        self,
        trunk: str | os.PathLike[str] | bytes,
        head: Head,
        *,
        input_mean: Scaling = 0.0,
        input_scale: Scaling = 1.0,
        output_offset: npt.ArrayLike = 0.0,
        output_scale: npt.ArrayLike = 1.0,
        made: Mapping[str, str] | None = None,
        backend: Backend = "auto",
        providers: Sequence[Any] | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        file = trunk if isinstance(trunk, bytes) else read_bounded(trunk, max_bytes, "max_bytes")
        how = _how(backend, providers, cache_dir, max_bytes)
        made = {"kbt_edge": _version(), **(made or {})}
        self._assemble(file, how, head, input_mean, input_scale, output_offset, output_scale, made)

    def _assemble(
        self,
        file: bytes,
        how: Mapping[str, Any],
        head: Head,
        input_mean: Scaling,
        input_scale: Scaling,
        output_offset: npt.ArrayLike,
        output_scale: npt.ArrayLike,
        made: Mapping[str, str],
        trunk: Trunk | None = None,
    ) -> None:
        trunk = Trunk(file, **how) if trunk is None else trunk
        if trunk.d != head.d:
            raise ShapeError(f"head: expected d = {trunk.d}, the width of the trunk's rows, got d = {head.d}")
        most = head.config["max_rows"]
        if trunk.rows > most:
            raise ShapeError(
                f"head: expected max_rows >= {trunk.rows}, the number of the trunk's rows, got max_rows = {most}; "
                f"make it with max_rows={trunk.rows}"
            )
        self._file, self._how, self._trunk, self._head, self._made = file, how, trunk, head, dict(made)
        self._inputs = scaled_inputs(trunk.inputs, input_mean, input_scale)
        self._gaussian = head.config["output"] == "gaussian"
        self._lead = () if trunk.rows == 1 else (trunk.rows,)
        self._offset = numbers("output_offset", output_offset, head.d_o, -bundles.MAX_MAGNITUDE)
        self._scale = numbers("output_scale", output_scale, head.d_o, 1 / bundles.MAX_MAGNITUDE)
        if not self._gaussian and (self._offset.any() or (self._scale != 1).any()):
            raise RangeError("output_offset, output_scale: a softmax head gives probabilities, which are not scaled")
        self._folder: Path | None = None
        self._policy = self._make_policy()

    def _make_policy(self) -> _core.Policy:
        """The model in C. If the trunk is a C function of one input, one call does a whole step."""
        ends = self._trunk.pipeline_ends()
        if ends is None:
            address, self._h = 0, np.zeros((self._trunk.rows, self._trunk.d), np.float32)
        else:
            address, self._inputs[0].buffer, self._h = ends
        offset, scale = (np.broadcast_to(values, (self._head.d_o,)).tolist() for values in (self._offset, self._scale))
        inputs = [entry.for_policy() for entry in self._inputs]
        log_scale = log_scale_of(scale, self._trunk.rows)
        return _core.Policy(self._head.core, address, inputs, self._h, offset, scale, log_scale)

    # ---- the verbs ---------------------------------------------------------------------------------------------------

    def predict(self, *x: Inputs) -> Prediction:
        """Mean and variances of the output at ``x``, in physical units.

        One array per input of the trunk, or a dict by name. The mean is (d_o,), or (rows, d_o) if the trunk has several
        rows; see ``Prediction`` for the rest.
        """
        if len(x) == 1:
            result = self._policy.predict(x[0])
            if type(result) is Prediction:
                result._origin = self._policy, self._head.core, self._head.core.ticket
                return result
            if result is not None:
                self._rejected(result, x)
        values = self._values(x)  # not a plain array, or no C function: convert it and run the trunk from Python
        self._run(values)
        result = self._policy.predict_rows()
        if not isinstance(result, Prediction):
            self._rejected(result, values)
        result._origin = self._policy, self._head.core, self._head.core.ticket
        return result

    def observe(self, y: npt.ArrayLike, noise_var: npt.ArrayLike | None = None) -> Update:
        """Learn the target of the latest ``predict``. The trunk does not run again. Once per prediction.

        y          shaped like the predicted mean; a number will do for a single output, class labels for a softmax
        noise_var  observation noise of this sample in squared units of y, instead of the head's own
        """
        if noise_var is None:
            result = self._policy.learn(False, y, None)
            if type(result) is Update:
                return result
            if result is not None:
                self._rejected(result, y=y)
        ticket = self._head.core.ticket
        target, noise = plain_array("y", y), None if noise_var is None else plain_array("noise_var", noise_var)
        must_be_latest(ticket, self._head.core)
        return self._learn(None, target, noise)

    def update(self, x: Inputs, y: npt.ArrayLike, noise_var: npt.ArrayLike | None = None) -> Update:
        """Learn the target ``y`` at ``x``; several inputs as a tuple or a dict."""
        values = self._values((x,))
        target, noise = plain_array("y", y), None if noise_var is None else plain_array("noise_var", noise_var)
        return self._learn(values, target, noise)

    def _learn(self, x: list[Array] | None, y: Array, noise_var: Array | None) -> Update:
        """Learn at ``x``, or at the latest prediction. Runs no user code, which could overwrite the buffers."""
        target, noise = self._target(y), self._noise(noise_var)
        if x is not None:
            self._run(x)
        result = self._policy.learn(x is not None, target, noise)
        if not isinstance(result, Update):
            self._rejected(result, x or (), y)
        return result

    def _rejected(self, result: object, x: Sequence[Any] = (), y: Any = None) -> NoReturn:
        """Raise the error for a rejected call, in the units of its arguments. Nothing runs again."""
        if result == _core.E_OWNER:
            raise RangeError(
                "observe: expected a prediction of this model before it; the latest was made by its head, or by "
                "another model with that head, in other units: call observe there, or predict with this model first",
                _core.E_ORDER,
            )
        given = {entry.name: value for entry, value in zip(self._inputs, x, strict=False)}
        if isinstance(y, (float, np.ndarray)):
            given["y"] = np.asarray(y)
        if result in (_core.E_NONFINITE, _core.E_TRUNK_INPUT):
            for i, (entry, value) in enumerate(zip(self._inputs, x, strict=False)):
                if entry.is_real:
                    check_finite(entry.name, value, value)
                    self._scale_input(i, value)
                    check_scaled(entry.name, value, entry.buffer)
            if "y" in given:
                check_finite("y", given["y"], given["y"])
                if self._gaussian:
                    check_scaled("y", given["y"], self.to_head_units(given["y"]))
        if result in (_core.E_TRUNK_INPUT, _core.E_TRUNK_OUTPUT):
            sizes = ", ".join(f"|{name}| up to {np.abs(value).max():.3g}" for name, value in given.items())
            raise NumericsError(f"trunk: expected an input for which its output is finite, got {sizes}")
        raise_rejection(result if isinstance(result, int) else 0, given, self._head.core.config)

    # ---- the units of the head ---------------------------------------------------------------------------------------

    def features(self, *x: Inputs) -> Array:
        """The input h of the head at ``x``: (d,), or (rows, d) if the trunk has several rows. A copy."""
        self._run(self._values(x))
        h: Array = self._h.astype(self._head.config["dtype"])
        return h[0] if self._trunk.rows == 1 else h

    def to_head_units(self, y: npt.ArrayLike) -> Array:
        """``y`` in the units of the head: (y - output_offset) / output_scale, or the labels of a softmax. A copy."""
        given = plain_array("y", y)
        if not self._gaussian:
            return np.array(targets(given, self._lead, self._head.core.config))
        return self._policy.to_head_units(self._target(given))

    # ---- what it is --------------------------------------------------------------------------------------------------

    @property
    def trunk(self) -> Trunk:
        return self._trunk

    @property
    def head(self) -> Head:
        """The head itself, in its own units: u = (y - output_offset) / output_scale."""
        return self._head

    @property
    def policy(self) -> _core.Policy:
        """The compiled model, for the other modules of this package."""
        return self._policy

    @property
    def noise_var(self) -> Array:
        """The observation noise now in use, in squared units of y: (d_o,) or (d_o, d_o)."""
        return self._policy.noise()

    @property
    def output_offset(self) -> Array:
        return np.array(self._offset)

    @property
    def output_scale(self) -> Array:
        return np.array(self._scale)

    @property
    def input_mean(self) -> dict[str, Array]:
        return {entry.spec.name: np.array(entry.mean) for entry in self._inputs if entry.is_real}

    @property
    def input_scale(self) -> dict[str, Array]:
        return {entry.spec.name: np.array(entry.scale) for entry in self._inputs if entry.is_real}

    @property
    def made(self) -> dict[str, str]:
        """How the model was made."""
        return dict(self._made)

    def __repr__(self) -> str:
        inputs = ", ".join(f"{spec.name} {spec.shape}" for spec in self._trunk.inputs)
        return f"Model({inputs} → {self._trunk.rows} × {self._trunk.d}, {self._trunk.backend}; {self._head!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        scaling = self.input_mean, self.input_scale, self.output_offset, self.output_scale
        head = self._head.to_bytes(), self._head.nbytes
        return _again, (type(self), self._file, self._how, head, scaling, self._made)

    # ---- the bundle --------------------------------------------------------------------------------------------------

    @classmethod
    def load(
        cls,
        name_or_path: str | os.PathLike[str],
        *,
        backend: Backend = "auto",
        providers: Sequence[Any] | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        max_bytes: int = MAX_BYTES,
    ) -> Model:
        """The model of a bundle: its folder, or the name of one that ships with the package.

        "cartpole" is rejected if a folder of that name holds a bundle too: write "./cartpole" or "kbt_edge:cartpole".
        A trunk or a head's state of more than ``max_bytes`` is rejected: raise it for large networks that you trust.
        """
        folder = bundles.find(name_or_path)
        found = bundles.read(folder, max_bytes)
        with _naming(folder / bundles.HEAD):
            head = Head.from_bytes(found.head)
        how = _how(backend, providers, cache_dir, max_bytes)
        with _naming(folder / bundles.TRUNK):
            trunk = Trunk(found.trunk, **how)
            said = [(entry.name, entry.shape, entry.dtype) for entry in found.inputs], found.rows, found.d
            holds = [(spec.name, spec.shape, spec.dtype) for spec in trunk.inputs], trunk.rows, trunk.d
            if said != holds:
                raise BundleError(f"expected inputs, rows and d as in {bundles.JSON}, {said}, got {holds}")
        model = cls.__new__(cls)
        model._assemble(
            found.trunk,
            how,
            head,
            {entry.name: entry.mean for entry in found.inputs if entry.mean is not None},
            {entry.name: entry.scale for entry in found.inputs if entry.scale is not None},
            0.0 if found.offset is None else found.offset,
            1.0 if found.scale is None else found.scale,
            found.made,
            trunk,
        )
        model._folder = None if bundles.is_shipped(folder) else folder
        return model

    def save(self, path: str | os.PathLike[str] | None = None) -> Path:
        """Save the model as a bundle: to ``path``, or to where it was loaded from or saved before.

        There only the head's state is replaced, atomically. A folder that holds another bundle is rejected. Returns the
        folder.
        """
        folder = self._folder if path is None else Path(path)
        if folder is None:
            raise BundleError("path: expected a folder, as this model was never saved")
        if str(folder).startswith(bundles.PREFIX):
            raise BundleError(f"path: expected a folder, got {folder}, the name of a bundle of the package")
        bundles.write(folder, self.bundle())
        self._folder = folder
        return folder

    def bundle(self) -> Bundle:
        """What ``save`` writes."""
        gaussian = self._gaussian
        return Bundle(
            trunk=self._file,
            head=self._head.to_bytes(),
            inputs=tuple(entry.described() for entry in self._inputs),
            rows=self._trunk.rows,
            d=self._trunk.d,
            offset=tuple(self._offset.tolist()) if gaussian else None,
            scale=tuple(self._scale.tolist()) if gaussian else None,
            made=self._made,
        )

    def _values(self, x: tuple[Any, ...]) -> list[Array]:
        """One plain array per input. Conversion can run any code, so it comes before the trunk is used."""
        if len(x) == len(self._inputs) == 1 and type(x[0]) is np.ndarray:  # the usual case in a control loop
            return list(x)
        return [plain_array(entry.name, value) for entry, value in zip(self._inputs, self._unpacked(x), strict=True)]

    def _run(self, values: list[Array]) -> None:
        """Run the trunk at ``values``. Its rows are then in the policy's h."""
        scaled = []
        for i, (entry, value) in enumerate(zip(self._inputs, values, strict=True)):
            if entry.is_real:
                self._scale_input(i, value)
            scaled.append(entry.buffer if entry.is_real else value)
        try:
            h = self._trunk(*scaled)
        except NumericsError:  # its message is in the units of the network
            self._rejected(_core.E_TRUNK_INPUT, values)
        if h is not self._h:
            np.copyto(self._h, h)

    def _scale_input(self, i: int, value: Array) -> None:
        """Scale to the buffer of input i. Numbers that are not finite are rejected later."""
        entry = self._inputs[i]
        check_real(entry.name, value)
        if value.shape not in entry.shapes:
            raise shape_error(entry.name, f"{entry.spec.shape}", value)
        self._policy.scale_input(i, cast(entry.name, value, np.float64))

    def _target(self, y: Array) -> Array:
        """``y`` as the core reads it, still in physical units: float64, or int32 labels."""
        if not self._gaussian:
            target = targets(y, self._lead, self._head.core.config)
            return target if target.dtype == np.int32 else target.astype(np.float64)
        check_real("y", y)
        expected = (*self._lead, self._head.d_o)
        number = set(expected) == {1}
        if y.shape != expected and not (number and y.shape == ()):
            raise shape_error("y", f"{expected}" + " or a number" * number, y)
        return cast("y", y, np.float64).reshape(expected)

    def _noise(self, noise_var: Array | None) -> Array | None:
        """``noise_var`` as the core reads it, checked in the units of the head."""
        if noise_var is None:
            return None
        scaled = scaled_noise(noise_var, per_output(self._scale, self._head.d_o))
        noise = cast("noise_var", scaled, self._head.config["dtype"])
        if not np.isfinite(noise).all():
            raise NumericsError(
                f"noise_var: expected variances that fit into {noise.dtype.name} when divided by output_scale², "
                f"got up to {np.max(noise_var):.3g}"
            )
        sample_noise("noise_var", noise, self._head.core.config)
        return cast("noise_var", noise_var, np.float64)

    def _unpacked(self, x: tuple[Any, ...]) -> tuple[Any, ...]:
        """One value per input, from several arguments, a tuple or a dict."""
        names = [spec.name for spec in self._trunk.inputs]
        if len(x) == 1 and isinstance(x[0], Mapping):
            if x[0].keys() != set(names):
                raise ShapeError(
                    f"x: expected the inputs {', '.join(names)}, got {', '.join(map(str, x[0])) or 'none'}"
                )
            return tuple(x[0][name] for name in names)
        if len(x) == 1 and len(names) > 1 and isinstance(x[0], (tuple, list)):
            x = tuple(x[0])
        if len(x) != len(names):
            raise ShapeError(f"x: expected {len(names)} inputs ({', '.join(names)}), got {len(x)}")
        return x


def _how(
    backend: Backend,
    providers: Sequence[Any] | None,
    cache_dir: str | os.PathLike[str] | None,
    max_bytes: int,
) -> dict[str, Any]:
    """Arguments of the trunk, for it and its copies."""
    return {"backend": backend, "providers": providers, "cache_dir": cache_dir, "max_bytes": max_bytes}


def _again(
    cls: type[Model],
    file: bytes,
    how: dict[str, Any],
    head: tuple[bytes, int],
    scaling: tuple[Scaling, Scaling, Array, Array],
    made: dict[str, str],
) -> Model:
    """A copied or unpickled model."""
    model = cls.__new__(cls)
    model._assemble(file, how, Head.from_bytes(head[0], max_memory=head[1]), *scaling, made)
    return model


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Put the name of the file in front of the error message."""
    try:
        yield
    except BundleError as error:
        raise BundleError(f"{path}: {error}", error.status) from None


def _version() -> str:
    from kbt_edge import __version__

    return __version__
