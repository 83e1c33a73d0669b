"""The look of the report's page: light and dark by the reader's system, printable, nothing fetched."""

STYLE = """
:root { color-scheme: light dark;
  --paper: #ffffff; --ink: #1b2430; --faint: #66707c; --line: #e2e6eb; --panel: #f6f8fa;
  --ours: #1d6fe0; --b: #d9730d; --c: #7c5cd6; --d: #0f8a6d; --e: #b3405f; --f: #6b7280;
  --good: #1a8f5a; --bad: #cf3a3a; --even: #8a94a0; --warn: #fdf3e7; --wrong: #fdecec; }
@media (prefers-color-scheme: dark) { :root {
  --paper: #12171d; --ink: #e3e8ee; --faint: #97a2ae; --line: #2b343e; --panel: #1a2129;
  --ours: #5b9dff; --b: #f0a04b; --c: #a48cf0; --d: #3dc29f; --e: #e57b97; --f: #a0a8b2;
  --good: #46c48a; --bad: #f07070; --even: #8a94a0; --warn: #33281a; --wrong: #3a2023; } }
* { box-sizing: border-box; }
body { font: 15px/1.55 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; color: var(--ink);
  background: var(--paper); max-width: 60rem; margin: 0 auto; padding: 2rem 1.2rem 4rem; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .2rem; }
h2 { font-size: 1.2rem; margin: 2.6rem 0 .5rem; padding-top: 1rem; border-top: 1px solid var(--line); }
h3 { font-size: .95rem; margin: 1.3rem 0 .2rem; }
p { margin: .4rem 0; max-width: 48rem; }
.sub, .faint, figcaption, .tile small, .tile i { color: var(--faint); }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(12.5rem, 1fr)); gap: .8rem;
  margin: 1.2rem 0 .6rem; }
.tile { background: var(--panel); border: 1px solid var(--line); border-left: 4px solid var(--even); border-radius: 6px;
  padding: .7rem .9rem; }
.tile.good { border-left-color: var(--good); } .tile.bad { border-left-color: var(--bad); }
.tile b { display: block; font-size: 1.6rem; line-height: 1.25; font-variant-numeric: tabular-nums; }
.tile.good b { color: var(--good); } .tile.bad b { color: var(--bad); }
.tile small, .tile i { display: block; font-size: .82rem; line-height: 1.35; font-style: normal; }
.call { border-radius: 6px; padding: .6rem .9rem; margin: .7rem 0; max-width: none; background: var(--warn); }
.call.wrong { background: var(--wrong); }
.scroll { overflow-x: auto; margin: .6rem 0; }
table { border-collapse: collapse; font-size: .86rem; font-variant-numeric: tabular-nums; min-width: 100%; }
th, td { padding: .32rem .6rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th { background: var(--panel); font-weight: 600; vertical-align: bottom; }
td { vertical-align: top; } td.text, th.text { text-align: left; }
td small { display: block; color: var(--faint); font-size: .76rem; }
td.text small { white-space: normal; min-width: 10rem; }
tr:hover td { background: var(--panel); }
td.bad, small.bad { color: var(--bad); font-weight: 600; } small.good { color: var(--good); font-weight: 600; }
code, pre { font: .82rem/1.45 ui-monospace, "DejaVu Sans Mono", monospace; }
pre { background: var(--panel); border: 1px solid var(--line); border-radius: 6px; padding: .6rem .8rem;
  margin: .3rem 0;  white-space: pre-wrap; overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: 10rem 1fr; gap: .15rem 1rem; font-size: .9rem; margin: .6rem 0; }
dt { color: var(--faint); } dd { margin: 0; overflow-wrap: anywhere; }
details { margin: .6rem 0; } summary { cursor: pointer; font-weight: 600; }
.pairs { display: grid; grid-template-columns: repeat(auto-fill, minmax(26rem, 1fr)); gap: 0 1.2rem; }
figure { margin: .8rem 0; } figcaption { font-size: .85rem; }
svg { display: block; max-width: 100%; height: auto; }
svg text { fill: var(--ink); font: 12px system-ui, "DejaVu Sans", sans-serif; } svg text.faint { fill: var(--faint); }
svg .grid { stroke: var(--line); } svg .one { stroke: var(--faint); stroke-width: 1.5; }
svg .whisker { stroke: var(--ink); stroke-width: 1.5; }
li { margin: .2rem 0; overflow-wrap: anywhere; }
@media print { body { max-width: none; } h2, figure { break-inside: avoid; } }
"""
