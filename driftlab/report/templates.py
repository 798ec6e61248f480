"""The templates of the pages: what is put into them is escaped, a name that is missing is an error."""

from __future__ import annotations

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from driftlab.report import tables


def template(name: str) -> Template:
    """The template in this folder of that name, with numbers as readers read them."""
    environment = Environment(
        loader=PackageLoader("driftlab.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": tables.number, "percent": tables.percent}
    return environment.get_template(name)
