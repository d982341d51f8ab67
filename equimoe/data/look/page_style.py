"""How the page of `data page` looks, and the one script in it: plain CSS for light and dark, and sorting of a table.

Colour is never alone: every coloured field has its number as text. The script holds nothing of the data.
"""

from __future__ import annotations

import base64
import hashlib

__all__ = ["POLICY", "SCRIPT", "STYLE"]

STYLE = """
:root { color-scheme: light dark;
  --ink: #1c2430; --soft: #5b6675; --paper: #ffffff; --panel: #f4f6f9; --line: #d5dbe3; --bar: #3d74b8; --warn:
  #a8321f;
  --s0: #eef3fa; --s1: #dce8f6; --s2: #c1d7ef; --s3: #a0c2e6; --s4: #7ba8d9; --s5: #4f87c5; --s6: #2d67a8; --s7:
  #154980;
  --d0: #9c4a10; --d1: #d98a45; --d2: #f3cfa8; --d3: #eef1f5; --d4: #b5dcd4; --d5: #4fa898; --d6: #12695b;
  --k0: #3d74b8; --k1: #d9822b; --k2: #2f9477; --k3: #b3487a; --k4: #8a6fc0; --k5: #b89a1c; --k6: #4aa5c8; --k7:
  #a0573a;
  --k8: #9aa4b1; }
@media (prefers-color-scheme: dark) { :root {
  --ink: #e3e8ef; --soft: #9aa7b6; --paper: #12161c; --panel: #1b2129; --line: #333d49; --bar: #6ba3e6; --warn:
  #ff9a85;
  --s0: #19222e; --s1: #1e2d40; --s2: #243b57; --s3: #2b4b71; --s4: #345f91; --s5: #5384bd; --s6: #85aee0; --s7:
  #bdd7f7;
  --d0: #f0a568; --d1: #b0692a; --d2: #5b3b1f; --d3: #222a34; --d4: #1d4a43; --d5: #2d8272; --d6: #6fd0bd;
  --k0: #6ba3e6; --k1: #e79a4d; --k2: #4cb998; --k3: #d56f9d; --k4: #a893de; --k5: #d3b840; --k6: #71c3e3; --k7:
  #c67c5d;
  --k8: #6b7685; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, -apple-system, "Segoe UI",
  Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: .5rem 0 .25rem; overflow-wrap: anywhere; }
h2 { font-size: 1.3rem; margin: 2.8rem 0 .5rem; padding-top: .6rem; border-top: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.4rem 0 .4rem; }
p { margin: .4rem 0 .8rem; max-width: 75ch; }
.soft { color: var(--soft); } .warn { color: var(--warn); font-weight: 600; } .mono { font-family: ui-monospace,
  "DejaVu Sans Mono", Menlo, Consolas, monospace; font-size: .85em; overflow-wrap: anywhere; }
nav { display: flex; flex-wrap: wrap; gap: .2rem 1rem; margin: .8rem 0; } a { color: var(--bar); }
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(165px, 1fr)); gap: .6rem; margin: 1.2rem 0;
  }
.facts div { background: var(--panel); border-radius: 8px; padding: .6rem .8rem; }
.facts dt { color: var(--soft); font-size: .8rem; } .facts dd { margin: 0; font-size: 1.25rem; font-weight: 600;
  line-height: 1.3; overflow-wrap: anywhere; } .facts small { display: block; font-size: .78rem; font-weight: 400;
  color: var(--soft); }
.row { display: flex; flex-wrap: wrap; gap: 1.2rem 2.2rem; align-items: flex-start; } .row > * { min-width: 0;
  max-width:
  100%; }
.scroll { overflow-x: auto; max-width: 100%; } .scroll tbody th, tr.sum th { white-space: nowrap; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .85rem; }
caption { text-align: left; font-weight: 600; padding-bottom: .3rem; }
th { font-weight: 600; text-align: left; } td, th { padding: .15rem .5rem; } td.n, th.n { text-align: right;
  white-space: nowrap; }
table.map { border-spacing: 2px; border-collapse: separate; font-size: .75rem; line-height: 1.25; }
table.map td { min-width: 3.4em; text-align: right; border-radius: 3px; padding: .12rem .35rem; }
table.map th { color: var(--soft); font-weight: 400; padding: .1rem .35rem; } table.map thead th { text-align:
  right; }
.s0 { background: var(--s0); } .s1 { background: var(--s1); } .s2 { background: var(--s2); } .s3 { background:
  var(--s3); }
.s4 { background: var(--s4); color: #0a1a2e; } .s5 { background: var(--s5); color: #fff; } .s6 { background:
  var(--s6);
  color: #fff; } .s7 { background: var(--s7); color: #fff; } .none { color: var(--soft); }
.d0 { background: var(--d0); color: #fff; } .d1 { background: var(--d1); color: #1d1005; } .d2 { background:
  var(--d2); }
.d3 { background: var(--d3); } .d4 { background: var(--d4); } .d5 { background: var(--d5); color: #04211b; }
.d6 { background: var(--d6); color: #fff; }
@media (prefers-color-scheme: dark) { .s4 { color: #fff; } .s5, .s6, .s7 { color: #0a1522; } .d0, .d6 { color:
  #10161d; }
  .d1, .d5 { color: #fff; } }
table.cells { width: 100%; } table.cells thead th.n { white-space: normal; } table.cells thead th { vertical-align:
  bottom; border-bottom: 2px solid var(--line);
  padding: .2rem .4rem; } table.cells td, table.cells tbody th { border-bottom: 1px solid var(--line); }
table.cells tbody th { position: sticky; left: 0; background: var(--paper); font-weight: 600; }
table.cells tr.sum td, table.cells tr.sum th { border-top: 2px solid var(--line); font-weight: 600; }
table.cells th.group { text-align: center; border-bottom: 1px solid var(--line); }
button.sort { all: unset; cursor: pointer; color: inherit; font: inherit; font-weight: 600; }
  button.sort:focus-visible {
  outline: 2px solid var(--bar); } th[aria-sort=ascending] button.sort::after { content: " \\2191"; }
th[aria-sort=descending] button.sort::after { content: " \\2193"; }
.tall { max-height: 32rem; overflow: auto; border: 1px solid var(--line); border-radius: 6px; }
.tall thead th { position: sticky; top: 0; background: var(--panel); z-index: 1; } .tall thead tr + tr th { top:
  1.75rem; }
.stack { display: flex; height: 1.6rem; border-radius: 5px; overflow: hidden; margin: .15rem 0 .5rem; min-width:
  200px;
  gap: 1px; } .stack span { min-width: 1px; } .stacks { width: 100%; }
.key { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .4em; }
.k0 { background: var(--k0); } .k1 { background: var(--k1); } .k2 { background: var(--k2); } .k3 { background:
  var(--k3); }
.k4 { background: var(--k4); } .k5 { background: var(--k5); } .k6 { background: var(--k6); } .k7 { background:
  var(--k7); }
.k8 { background: var(--k8); }
.bar { display: block; height: .8rem; border-radius: 2px; background: var(--bar); min-width: 1px; }
td.long { width: 100%; min-width: 120px; }
.bar.over { background: var(--warn); } table.track { width: 100%; max-width: 640px; } table.track td.long {
  background: linear-gradient(var(--panel), var(--panel)) content-box; }
.halves { display: grid; grid-template-columns: repeat(auto-fit, minmax(280px, 1fr)); gap: 1.2rem 2.2rem; }
  table.half {
  width: 100%; } .spark { display: flex; align-items: end; gap: .8rem; font-size: .78rem; margin-bottom: .5rem; }
svg { display: block; } svg text { fill: var(--soft); font-size: 11px; } svg .b { fill: var(--bar); } svg .axis {
  stroke: var(--line); } svg .cap { stroke: var(--warn); stroke-width: 1.5; stroke-dasharray: 4 3; } svg text.cap {
  fill: var(--warn); stroke: none; } svg .over { fill: var(--warn); }
.legend { display: flex; flex-wrap: wrap; gap: 2px; font-size: .75rem; margin: .3rem 0 .8rem; } .legend span {
  padding:
  .1rem .45rem; border-radius: 3px; } .legend .plain { padding-left: 0; }
details { border: 1px solid var(--line); border-radius: 6px; margin: .4rem 0; } summary { cursor: pointer; padding:
  .4rem
  .7rem; } details > *:not(summary) { margin-left: .7rem; margin-right: .7rem; }
pre { background: var(--panel); border-radius: 6px; padding: .6rem .8rem; margin: .3rem 0 .9rem; white-space:
  pre-wrap;
  overflow-wrap: anywhere; font: .82rem/1.45 ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace;
  tab-size: 4; }
footer { margin-top: 3rem; color: var(--soft); font-size: .85rem; }
@media print { details > * { display: block; } .tall { max-height: none; } }
"""

# The rows of the table stay what they are; only their order changes. The row of sums stays where it is.
SCRIPT = """
for (const button of document.querySelectorAll("button.sort")) button.addEventListener("click", () => {
  const head = button.closest("th"), table = head.closest("table"), body = table.tBodies[0];
  const column = Number(button.dataset.column);
  const now = head.getAttribute("aria-sort");
  const down = now === "ascending" || now !== "descending" && column > 0;
  for (const other of table.querySelectorAll("th[aria-sort]")) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  const value = row => {
    const cell = row.cells[column];
    return "v" in cell.dataset ? Number(cell.dataset.v) : cell.textContent;
  };
  const order = (a, b) => { const x = value(a), y = value(b); return x < y ? -1 : x > y ? 1 : 0; };
  const rows = [...body.rows].sort(order);
  if (down) rows.reverse();
  body.append(...rows);
});
"""

_SCRIPT_HASH = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
# What the page may do: nothing but this script and these styles. A second lock, should escaping ever fail.
POLICY = (
    f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{_SCRIPT_HASH}'; base-uri 'none';"
    " form-action 'none'"
)
