"""How the report looks, on top of the colours that all pages of dflow share.

What scrolls has a shadow at the sides where there is more: two covers move with the content over two that stay.
"""

PAGE_STYLE = """
header, main, footer { max-width: 1200px; margin: 0 auto; padding: 0 16px; }
header { padding-top: 14px; }
footer { padding: 24px 16px; color: var(--faint); font-size: 13px; overflow-wrap: anywhere; }
h1 { font-size: 22px; margin: 4px 0; overflow-wrap: anywhere; }
h1 small { font-size: 14px; font-weight: normal; color: var(--faint); }
h2 { font-size: 18px; margin: 28px 0 8px; padding-top: 10px; border-top: 1px solid var(--line); }
h3 { font-size: 15px; margin: 18px 0 6px; overflow-wrap: anywhere; }
h4 { font-size: 13px; margin: 8px 0 2px; color: var(--faint); font-weight: 600; overflow-wrap: anywhere; }
p { margin: 6px 0; overflow-wrap: anywhere; }
ul { padding-left: 20px; margin: 6px 0; }
li { margin: 3px 0; overflow-wrap: anywhere; }
nav { display: flex; flex-wrap: wrap; gap: 4px 14px; font-size: 14px; }
section { scroll-margin-top: 8px; }
.faint { color: var(--faint); font-weight: normal; }
.change { color: var(--series-1); }
.notice { list-style: none; margin: 6px 0 6px -20px; padding: 7px 10px; background: var(--warn); border-radius: 6px; }
.mark { padding: 1px 7px; border-radius: 9px; background: var(--none); white-space: nowrap; }
p .mark, td .mark.bad { white-space: normal; }
.good { background: var(--good); } .warn { background: var(--warn); } .bad { background: var(--bad); }
.info { background: var(--info); }
.dot { display: inline-block; width: 10px; height: 10px; border-radius: 50%; margin-right: 5px; }
.scroll { overflow-x: auto; max-width: 100%; background:
  linear-gradient(to right, var(--page) 40%, transparent) left / 36px 200% no-repeat local,
  linear-gradient(to left, var(--page) 40%, transparent) right / 36px 200% no-repeat local,
  linear-gradient(to right, var(--line), transparent) left / 14px 100% no-repeat scroll,
  linear-gradient(to left, var(--line), transparent) right / 14px 100% no-repeat scroll; }
table { border-collapse: collapse; font-size: 13.5px; font-variant-numeric: tabular-nums; margin: 4px 0; }
th, td { text-align: left; vertical-align: top; padding: 4px 10px 4px 0; border-bottom: 1px solid var(--line); }
th { color: var(--faint); font-weight: 600; white-space: nowrap; }
td { max-width: 34rem; overflow-wrap: break-word; }
td.number { text-align: right; }
.figures td, td.number { white-space: nowrap; }
.figures td:first-child { white-space: normal; }
.nodes td:not(:last-child) { white-space: nowrap; }
.parts th { white-space: normal; vertical-align: bottom; }
.figures th { white-space: normal; max-width: 15rem; vertical-align: bottom; }
.beside { display: flex; flex-wrap: wrap; gap: 8px 24px; align-items: flex-start; }
.beside > * { min-width: 0; } .beside > .graph + .scroll, .beside > .grid { flex: 1 1 500px; }
.facts td.number { text-align: left; } .facts td:first-child { color: var(--faint); }
pre { overflow-x: auto; background: var(--panel); padding: 10px; border-radius: 6px; font-size: 12.5px; }
details { margin: 4px 0; } summary { cursor: pointer; overflow-wrap: anywhere; }
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(330px, 100%), 1fr)); gap: 8px 20px; }
.wide-grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(440px, 100%), 1fr)); gap: 8px 24px; }
.parts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(360px, 100%), 1fr)); gap: 4px 28px; }
.parts > * { min-width: 0; } .parts > .full { grid-column: 1 / -1; }
.grid > *, .wide-grid > * { min-width: 0; }
@media (max-width: 600px) { .figures td .faint, .figures td .change { display: block; } }
figure { margin: 0; }
figcaption { display: flex; flex-wrap: wrap; gap: 2px 14px; font-size: 12.5px; color: var(--faint); }
figcaption i:not(.dot) { display: inline-block; width: 18px; margin-right: 5px; vertical-align: middle; }
.dot.ring { background: none; border: 1.6px solid var(--faint); }
svg .selected { stroke-width: 1.8; }
.chart { max-width: 420px; } .chart svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--text); font: 11px system-ui, sans-serif; }
svg .label { fill: var(--faint); } svg .name { font-weight: 600; }
svg .line { fill: none; stroke-width: 1.6; stroke-linejoin: round; }
svg .band { opacity: 0.18; }
svg .grid { stroke: var(--line); stroke-width: 0.6; } svg .axis { stroke: var(--faint); stroke-width: 1; }
svg .whisker { stroke: var(--text); stroke-width: 1.2; fill: none; }
svg .edge { fill: none; stroke: var(--faint); stroke-width: 1.2; }
svg .box { stroke: var(--line); }
img { max-width: 100%; height: auto; background: #ffffff; border-radius: 6px; }
iframe { width: 100%; border: 1px solid var(--line); border-radius: 6px; background: var(--page); }
"""
