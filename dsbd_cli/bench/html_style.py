"""The report's style sheet: light and dark, for a desk and for a phone."""

from __future__ import annotations

CSS = """
:root{color-scheme:light dark;--back:#fff;--ink:#1c2326;--soft:#566167;--line:#dfe4e6;--tint:#eef5f1;--deep:#0b6e4f;
--warn:#fff6e0;--edge:#d99a00;--shade:rgba(20,30,35,.28)}
@media (prefers-color-scheme:dark){:root{--back:#14191b;--ink:#e3e8ea;--soft:#9fabb0;--line:#323b3f;--tint:#1d2b26;
--deep:#5fcfa6;--warn:#33290f;--edge:#d99a00;--shade:rgba(0,0,0,.75)}
/* Pictures are drawn for paper: turned over, with their hues kept. */
.plot{filter:invert(.91) hue-rotate(180deg)}}
*{box-sizing:border-box}
body{margin:0;background:var(--back);color:var(--ink);
font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1240px;margin:0 auto;padding:2rem 1.25rem 4rem}
h1{font-size:1.75rem;line-height:1.2;margin:0 0 1rem}
h2{font-size:1.2rem;margin:2.4rem 0 .5rem;padding-top:.6rem;border-top:1px solid var(--line)}
p,li{max-width:82ch;overflow-wrap:anywhere}
p{margin:.4rem 0 .8rem}
.short li{margin:.35rem 0}
.note{font-size:.85rem;color:var(--soft)}
.warn{background:var(--warn);border-left:4px solid var(--edge);padding:.6rem .9rem;max-width:none}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.2rem 1.1rem;margin:1rem 0;font-size:.93rem}
dt{color:var(--soft)}
dd{margin:0;overflow-wrap:anywhere}
/* Shadows at the edges beyond which there is more: covers of the background's colour scroll with the content. */
.wide{overflow-x:auto;margin:.6rem 0;-webkit-overflow-scrolling:touch;
background:linear-gradient(to right,var(--back) 30%,transparent) 0 0/40px 100% no-repeat local,
linear-gradient(to left,var(--back) 30%,transparent) 100% 0/40px 100% no-repeat local,
linear-gradient(to right,var(--shade),transparent) 0 0/14px 100% no-repeat scroll,
linear-gradient(to left,var(--shade),transparent) 100% 0/14px 100% no-repeat scroll}
.hint{display:none;font-size:.8rem;color:var(--soft);margin:.5rem 0 0}
table{border-collapse:collapse;font-size:.84rem;min-width:100%}
th,td{padding:.36rem .6rem;text-align:right;white-space:nowrap;border-bottom:1px solid var(--line)}
thead th{color:var(--soft);font-weight:600;border-bottom:2px solid var(--line)}
td{font-variant-numeric:tabular-nums}
th:first-child{text-align:left;position:sticky;left:0;background:var(--back)}
tbody th{font-weight:600}
tr.mark td,tr.mark th{background:var(--tint)}
.answers td{text-align:left;white-space:pre-wrap;vertical-align:top}
.answers td:nth-child(2){min-width:24rem;font-family:ui-monospace,Menlo,Consolas,monospace;font-size:.8rem;
overflow-wrap:anywhere}
.answers th{text-align:left;vertical-align:top}
.plot{display:block;width:100%;max-width:1180px;min-width:620px;height:auto}
.plot.single{max-width:800px}
details{margin:.5rem 0}
summary{cursor:pointer;color:var(--deep)}
code{font-size:.9em}
ul{padding-left:1.2rem}
@media (max-width:760px){.hint{display:block}}
.hint.many{display:block}
@media (max-width:640px){body{font-size:15px}main{padding:1.2rem .9rem 3rem}h1{font-size:1.4rem}
dl{grid-template-columns:1fr;gap:0}dt{margin-top:.5rem;font-size:.82rem}th,td{padding:.32rem .5rem}
tbody th{min-width:6rem;max-width:8.5rem;white-space:normal;overflow-wrap:break-word}
.answers td:nth-child(2){min-width:16rem}}
@media print{.wide{overflow:visible;background:none}.hint,details{display:none}
table{font-size:.6rem}th,td{white-space:normal}}
""".strip()
