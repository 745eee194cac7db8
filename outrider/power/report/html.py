"""Parts of a report as HTML: one file, no network, no scripts, readable in light and dark, and on a phone.

Whatever text comes in is escaped; drawings and sections that were made here are not escaped again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

__all__ = ["definitions", "document", "figure", "section", "table"]

_STYLE = """
:root{color-scheme:light dark;--bg:#fcfcfa;--fg:#1d2226;--dim:#5c666e;--rule:#d9dcd8;--soft:#f0f1ed;
--accent:#0b6e8f;--warn:#8a4b00;--warnbg:#fff1dc;--mark:45%}
@media(prefers-color-scheme:dark){:root{--bg:#14181b;--fg:#e6e9ea;--dim:#9aa5ac;--rule:#343c42;--soft:#1d2327;
--accent:#5cc0e0;--warn:#ffc06b;--warnbg:#3a2a12;--mark:60%}}
*{box-sizing:border-box}
body{margin:0 auto;padding:1rem;max-width:60rem;background:var(--bg);color:var(--fg);
font:1rem/1.5 system-ui,sans-serif}
h1{font-size:1.15rem;margin:0 0 .5rem}h2{font-size:1.05rem;margin:2rem 0 .5rem}
.answer{font-size:1.35rem;line-height:1.35;margin:.5rem 0 1rem}
.simulated{background:var(--warnbg);color:var(--warn);padding:.5rem .75rem;border-radius:.4rem;font-weight:600}
.dim,figcaption{color:var(--dim);font-size:.9rem}
figure{margin:0}svg{width:100%;max-width:44rem;height:auto;display:block}
svg text{font:11px system-ui,sans-serif;fill:var(--dim)}svg .name{fill:var(--fg);font-weight:600}
svg .label{fill:var(--fg)}.grid{stroke:var(--rule)}.line,.front{fill:none;stroke:var(--accent);stroke-width:1.3}
.front{stroke-dasharray:4 3;opacity:.6}.whisker{stroke:var(--fg);stroke-width:1.2}.mark{fill:var(--accent)}
.hollow{stroke:var(--fg);stroke-dasharray:2 2}.bound{stroke:var(--warn);stroke-dasharray:5 3}
.band0{fill:var(--soft)}.band1{fill:var(--rule);opacity:.55}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:.9rem}
th,td{padding:.3rem .6rem;text-align:right;border-bottom:1px solid var(--rule);white-space:nowrap}
th:first-child,td:first-child{text-align:left}thead th{color:var(--dim);font-weight:600;vertical-align:bottom}
dl{display:grid;grid-template-columns:minmax(6rem,auto) 1fr;gap:.2rem 1rem;font-size:.9rem}
dt{color:var(--dim)}dd{margin:0;overflow-wrap:anywhere}
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def document(title: str, sections: Iterable[str]) -> str:
    """The whole page; empty sections are left out."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n<main>\n"
        + "\n".join(section for section in sections if section)
        + "\n</main>\n</body></html>\n"
    )


def section(title: str, *parts: str) -> str:
    """A heading and what is below it."""
    return f"<section><h2>{escape(title)}</h2>{''.join(parts)}</section>"


def figure(drawing: str, caption: str) -> str:
    """A drawing with a caption."""
    return f"<figure>{drawing}<figcaption>{escape(caption)}</figcaption></figure>"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table that scrolls sideways where it does not fit."""
    top = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(value)}</td>" for value in row) + "</tr>" for row in rows)
    return (
        f'<div class="scroll" tabindex="0"><table><thead><tr>{top}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def definitions(pairs: Sequence[tuple[str, str]]) -> str:
    """Names and what they are."""
    return "<dl>" + "".join(f"<dt>{escape(a)}</dt><dd>{escape(b)}</dd>" for a, b in pairs) + "</dl>"
