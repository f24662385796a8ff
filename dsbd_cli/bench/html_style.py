"""The report's style sheet."""

from __future__ import annotations

CSS = """
:root{color-scheme:light;--ink:#1c2326;--soft:#5b666b;--line:#dfe4e6;--tint:#f3f7f5;--deep:#0b6e4f}
*{box-sizing:border-box}
body{margin:0;background:#fff;color:var(--ink);font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1240px;margin:0 auto;padding:2rem 1.25rem 4rem}
h1{font-size:1.75rem;line-height:1.2;margin:0 0 1rem}
h2{font-size:1.2rem;margin:2.4rem 0 .5rem;padding-top:.6rem;border-top:1px solid var(--line)}
p,li{max-width:82ch}
p{margin:.4rem 0 .8rem}
.warn{background:#fff6e0;border-left:4px solid #d99a00;padding:.6rem .9rem;max-width:none}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.2rem 1.1rem;margin:1rem 0;font-size:.93rem}
dt{color:var(--soft)}
dd{margin:0;overflow-wrap:anywhere}
.wide{overflow-x:auto;margin:.6rem 0;-webkit-overflow-scrolling:touch}
table{border-collapse:collapse;font-size:.84rem;min-width:100%}
th,td{padding:.36rem .6rem;text-align:right;white-space:nowrap;border-bottom:1px solid var(--line)}
th{color:var(--soft);font-weight:600;border-bottom:2px solid var(--line)}
td{font-variant-numeric:tabular-nums}
th:first-child,td:first-child{text-align:left;position:sticky;left:0;background:#fff}
td:first-child{font-weight:600}
tr.mark td,tr.mark td:first-child{background:var(--tint)}
.answers td{text-align:left;white-space:pre-wrap;vertical-align:top}
.answers td:nth-child(2){min-width:24rem;font-family:ui-monospace,Menlo,Consolas,monospace;font-size:.8rem}
.answers th{text-align:left}
.plot{display:block;width:100%;max-width:1180px;min-width:620px;height:auto}
.plot.single{max-width:760px}
details{margin:.5rem 0}
summary{cursor:pointer;color:var(--deep)}
ul{padding-left:1.2rem}
@media (max-width:640px){body{font-size:15px}main{padding:1.2rem .9rem 3rem}h1{font-size:1.4rem}
dl{grid-template-columns:1fr;gap:0}dt{margin-top:.5rem;font-size:.82rem}th,td{padding:.32rem .5rem}
.answers td:nth-child(2){min-width:16rem}}
@media print{.wide{overflow:visible}details{display:none}}
""".strip()
