"""Text from Jinja2 templates."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["rendered"]


def rendered(template: Path, values: Mapping[str, Any]) -> str:
    """The file ``template`` with ``values`` filled in. A name without a value is an error."""
    import jinja2  # comes with the C generator, and is needed only where C is generated

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(template.parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["hex"] = float.hex  # every bit of a double
    environment.filters["byte"] = "0x{:02x}".format
    return environment.get_template(template.name).render(values)
