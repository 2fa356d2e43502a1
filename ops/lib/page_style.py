"""How all pages look that dflow writes: colours that are readable in the light and in the dark."""

from __future__ import annotations

STYLE = """
:root {
  color-scheme: light dark;
  --page: #ffffff; --panel: #f6f7f9; --text: #1b1f24; --faint: #5a6370; --line: #d5dae1; --link: #0a58ca;
  --good: #cdebd6; --warn: #fbe6b0; --bad: #f8cdc8; --info: #d3e2fa; --none: #e6e8ec;
  --series-0: #1f6fd6; --series-1: #d1581a; --series-2: #1a8a4c; --series-3: #8b46c7; --series-4: #b8860b;
  --series-5: #c2316f; --series-6: #0d8a99; --series-7: #6b7280;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14171b; --panel: #1d2127; --text: #e4e7eb; --faint: #9aa4b1; --line: #38404a; --link: #7db2ff;
    --good: #1f4d33; --warn: #5a4716; --bad: #63272a; --info: #233f6b; --none: #2f353d;
    --series-0: #6aa9ff; --series-1: #ff9355; --series-2: #58c98a; --series-3: #c08cf2; --series-4: #e0b341;
    --series-5: #f277a8; --series-6: #4ec5d4; --series-7: #a3acb8;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text); font: 15px/1.45 system-ui, sans-serif; }
a { color: var(--link); }
"""
