"""HTML and SVG that is escaped by construction: only a `Markup` enters a page as it is."""

from __future__ import annotations

import json
from html import escape
from typing import Any

VOID = frozenset({"meta", "input", "br"})


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def element(name: str, /, *children: str | None, **attributes: str | float | bool | None) -> Markup:
    """An element; children that are no `Markup` are escaped, attributes always are.

    An underscore at the end of an attribute's name is dropped, others become hyphens. None and
    False leave an attribute or a child out; True gives it no value.

    Example:
        >>> element("p", "a < b", element("b", "!"), class_="x", data_key='"', hidden=False)
        '<p class="x" data-key="&quot;">a &lt; b<b>!</b></p>'
    """
    told = "".join(
        f" {key}" if value is True else f' {key}="{escape(str(value))}"'
        for key, value in (
            (name.rstrip("_").replace("_", "-"), value) for name, value in attributes.items()
        )
        if value is not None and value is not False
    )
    if name in VOID:
        return Markup(f"<{name}{told}>")
    return Markup(f"<{name}{told}>{joined(*children)}</{name}>")


def joined(*children: str | None) -> Markup:
    """Children one after another."""
    return Markup(
        "".join(
            child if isinstance(child, Markup) else escape(child)
            for child in children
            if child is not None
        )
    )


def data(value: Any, **attributes: str) -> Markup:
    r"""A value for the page's script, as JSON that cannot end its element.

    Example:
        >>> data(["</script>"], class_="x")
        '<script type="application/json" class="x">["\\u003c/script>"]</script>'
    """
    text = json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return element("script", Markup(text), type="application/json", **attributes)


def section(title: str, *children: str | None) -> Markup:
    """A section of the page; the navigation finds it by its `id`."""
    name = title.lower().replace(" ", "-")
    return element("section", element("h2", title), *children, id=name)


def scrolled(label: str, *children: str | None, class_: str = "") -> Markup:
    """What may be wider than the screen, in a region that the keyboard scrolls, too."""
    kind = f"scrolled {class_}".strip()
    return element("div", *children, class_=kind, role="region", aria_label=label, tabindex="0")
