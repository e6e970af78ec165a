"""The report's style sheet and its one script (a copy button); no font or file is fetched."""

from __future__ import annotations

__all__ = ["CSS", "SCRIPT"]

CSS = """
:root{color-scheme:light dark;--bg:#fff;--ink:#1b1f24;--soft:#59636e;--line:#d9dee4;--card:#f5f7f9;
--accent:#0a5fd1;--good:#14713a;--bad:#b3261e;--warn:#8a5300;--mark:#e6f4ea;--band:#0a5fd11f;--noise:#8a53002b}
@media(prefers-color-scheme:dark){:root{--bg:#15181c;--ink:#e4e7eb;--soft:#9ba5b0;--line:#333a42;--card:#1d2227;
--accent:#79b4ff;--good:#63d48b;--bad:#ff9087;--warn:#e8b45a;--mark:#16301f;--band:#79b4ff29;--noise:#e8b45a33}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--bg);color:var(--ink);font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,
"Helvetica Neue",Arial,sans-serif;overflow-wrap:anywhere}
main{max-width:1240px;margin:0 auto;padding:28px 24px 64px}
code,pre,.lb{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}
code{font-size:.92em;unicode-bidi:isolate}
h1,h2,h3,p,ul{margin:0}
.over{color:var(--soft);font-size:.875rem;margin-bottom:10px}
.verdict{border-left:5px solid var(--soft);padding:2px 0 2px 18px}
.verdict.good{border-color:var(--good)}
.verdict.bad{border-color:var(--bad)}.verdict.warn{border-color:var(--warn)}
h1{font-size:clamp(1.3rem,1rem + 1.5vw,1.85rem);line-height:1.3;font-weight:650;letter-spacing:-.01em;
text-wrap:pretty}
h1 code{font-size:.9em;font-weight:600}
h2{font-size:1.2rem;line-height:1.3;font-weight:650;margin:44px 0 4px}
h3{font-size:1rem;font-weight:600;margin:20px 0 4px}
.lead{color:var(--soft);max-width:78ch;margin-bottom:12px;font-size:.94rem}
.whose{margin:22px 0 8px;color:var(--soft);font-size:.94rem}
.tiles{display:grid;grid-template-columns:repeat(4,minmax(0,1fr));gap:12px}
.tile{background:var(--card);border-radius:10px;padding:12px 16px}
.tile b{display:block;font-size:1.6rem;line-height:1.25;font-weight:650;font-variant-numeric:tabular-nums}
.tile b small{font-size:.95rem;font-weight:500}
.tile span{display:block;color:var(--soft);font-size:.84rem;line-height:1.4}
.lines{list-style:none;padding:0;margin:20px 0 0;max-width:92ch}
.lines li{padding:8px 0;border-top:1px solid var(--line)}
.lines li code{font-weight:600}
.notes{border:1px solid var(--line);border-radius:10px;padding:12px 18px;margin:20px 0 0}
.notes ul{padding-left:1.1em}.notes li+li{margin-top:4px}
.scroll{overflow-x:auto;border:1px solid var(--line);border-radius:10px}
.scroll:focus-visible{outline:2px solid var(--accent)}
table{border-collapse:collapse;width:100%;font-size:.85rem;font-variant-numeric:tabular-nums}
th,td{padding:8px 10px;text-align:left;vertical-align:top;border-top:1px solid var(--line)}
thead th{border-top:0;color:var(--soft);font-weight:600;vertical-align:bottom;white-space:nowrap;
background:var(--card)}
tbody th{font-weight:500;min-width:9.5rem;max-width:22rem}
.num{text-align:right;white-space:nowrap}
.foot{margin:8px 0 0}
.num small,th small{display:block;color:var(--soft);font-size:.8rem;font-weight:400}
.text{min-width:14rem}
.hash{white-space:nowrap}
tr.chosen>*{background:var(--mark)}
.badge{display:inline-block;margin-left:6px;padding:0 8px;border-radius:99px;font-size:.75rem;font-weight:600;
border:1px solid currentColor;white-space:nowrap}
th .badge{margin-left:0}
.good{color:var(--good)}.bad{color:var(--bad)}.warn{color:var(--warn)}
.verdict.good,.verdict.bad,.verdict.warn{color:inherit}
figure{margin:12px 0 0}
figcaption{color:var(--soft);font-size:.875rem;margin-top:8px;max-width:92ch}
svg{display:block;width:100%;height:auto}
.narrow{display:none}
svg text{fill:var(--soft);font-size:12px}
svg .lb{fill:var(--ink);paint-order:stroke;stroke:var(--bg);stroke-width:3px;
stroke-linejoin:round}
svg .bt{fill:var(--warn)}
.gr{stroke:var(--line);fill:none}.one{stroke:var(--soft);fill:none}
.fr{stroke:var(--accent);fill:none;stroke-width:1.5;opacity:.5}
.bu{stroke:var(--warn);fill:none;stroke-dasharray:5 4}
.ld{stroke:var(--soft);fill:none;stroke-width:.8;opacity:.7}
.eb{fill:none;stroke-width:1.4;stroke:var(--accent);opacity:.75}.eb.base{stroke:var(--soft)}.eb.rec{stroke:var(--good)}
.mk{fill:var(--accent);stroke:var(--bg);stroke-width:1}.mk.base{fill:var(--bg);stroke:var(--soft);stroke-width:2}
.mk.rec{fill:var(--good)}.mk.tried{fill:var(--bg);stroke:var(--accent);stroke-width:1.4}
.mk.base.rec{fill:var(--bg);stroke:var(--good)}.ring{fill:none;stroke:var(--good);stroke-width:1.5}
.eq{fill:var(--band)}.aa{fill:var(--noise)}.bar{fill:var(--accent);opacity:.55}.bar.bad{fill:var(--bad);opacity:1}
.no{fill:transparent}
.c-clipping{fill:var(--bad);background:var(--bad)}.c-bias{fill:var(--soft);background:var(--soft)}
.c-activation_rounding{fill:var(--accent);background:var(--accent)}
.c-weight_rounding{fill:var(--good);background:var(--good)}
.c-saturation{fill:var(--warn);background:var(--warn)}.text svg{height:10px;margin:5px 0 3px}
.text small{color:var(--soft)}
.legend{display:flex;flex-wrap:wrap;gap:4px 18px;list-style:none;padding:0;color:var(--soft);font-size:.84rem}
.legend b{font-weight:600;color:var(--ink)}
.legend i{display:inline-block;width:12px;height:12px;margin-right:6px;vertical-align:-1px}
.i-base{border:2px solid var(--soft)}.i-cand{background:var(--accent);border-radius:50%}
.i-tried{border:2px solid var(--accent);border-radius:50%}
.i-rec{background:var(--good);border-radius:50%}.i-eq{background:var(--band)}.i-aa{background:var(--noise)}
.i-fr{height:2px!important;background:var(--accent);opacity:.6;vertical-align:4px!important}
.i-bu{height:0!important;border-top:2px dashed var(--warn);vertical-align:4px!important}
details{margin-top:10px}summary{cursor:pointer;font-weight:600}
dl{display:grid;grid-template-columns:max-content minmax(0,1fr);gap:4px 20px;margin:8px 0 0;font-size:.92rem}
dt{color:var(--soft)}dd{margin:0}
.command{position:relative;margin-top:10px}
pre{margin:0;background:var(--card);border-radius:10px;padding:14px 76px 14px 16px;white-space:pre-wrap;
font-size:.875rem;line-height:1.5}
button{position:absolute;top:9px;right:9px;font:600 .8rem system-ui,sans-serif;color:var(--ink);
background:var(--bg);border:1px solid var(--line);border-radius:7px;padding:4px 11px;cursor:pointer}
footer{margin-top:48px;color:var(--soft);font-size:.84rem}
@media(max-width:640px){main{padding:20px 16px 48px}.wide{display:none}.narrow{display:block}
.tiles{grid-template-columns:repeat(2,minmax(0,1fr))}.tile{padding:10px 12px}.tile b{font-size:1.35rem}
dl{grid-template-columns:minmax(0,1fr);gap:0}dd{margin-bottom:8px}th,td{padding:7px 10px}
.cards,.cards tbody{display:block}.cards thead{display:none}
.cards tr{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));padding:8px 0;
border-top:1px solid var(--line)}
.cards tr.chosen{background:var(--mark)}.cards tbody tr:first-child{border-top:0}
.cards th,.cards td{display:block;border-top:0;padding:4px 12px;text-align:left;white-space:normal;
background:none}
.cards th{grid-column:1/-1;max-width:none;font-weight:600}
.cards td::before{content:attr(data-name);display:block;color:var(--soft);font-size:.8rem}}
@media print{:root{--bg:#fff;--ink:#000;--soft:#444;--line:#bbb;--card:#f3f3f3;--accent:#0a4fae;
--good:#0c5c2d;--bad:#9c1c15;--warn:#6f4300;--mark:#e6f4ea;--band:#0a5fd11f;--noise:#8a53002b}
body{font-size:11pt}main{max-width:none;padding:0}button{display:none}h2{break-after:avoid}
figure,tr,.tile,.lines li{break-inside:avoid}.scroll{overflow:visible;border:0}
table{font-size:8pt}th,td{padding:4px 5px}
*{-webkit-print-color-adjust:exact;print-color-adjust:exact}}
"""

SCRIPT = """
for(const box of document.querySelectorAll('.command')){const button=box.querySelector('button');
if(!navigator.clipboard)continue;button.hidden=false;button.onclick=async()=>{
await navigator.clipboard.writeText(box.querySelector('pre').textContent);button.textContent='Copied';
setTimeout(()=>{button.textContent='Copy'},1500)}}
"""
