"""The graph as one HTML file with modules that fold and unfold; it loads nothing else.

The rows of each module come from `layered_layout`; where they are on the page, the browser decides, so that a module
can change its size. A few lines of script then draw the edges between the boxes that are shown. Start reading at
`as_page`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from itertools import count, pairwise

from manyhands.dataflow.folding import Box
from manyhands.dataflow.graph import DataflowGraph, shape_of
from manyhands.dataflow.layered_layout import rows_of
from manyhands.dataflow.svg_picture import NEUTRAL, colours_of, summary

__all__ = ["as_page"]

STYLE = """
body{font:12px system-ui,"DejaVu Sans",sans-serif;color:#1d1d1d;margin:16px}
h1{font-size:16px;margin:0 0 4px}p{margin:2px 0;color:#5c5c5c}
.legend span{display:inline-block;margin:6px 14px 6px 0}.legend i{display:inline-block;width:14px;height:12px;
border:1px solid #8a8a8a;margin-right:5px;vertical-align:-2px}
#picture{position:relative;width:max-content;min-width:100%;padding:8px 0}
svg{position:absolute;left:0;top:0;pointer-events:none;overflow:visible;z-index:2}
.row{display:flex;justify-content:center;gap:26px;margin-top:40px;align-items:center}
.inside>.row:first-child{margin-top:8px}
.box{border:1px solid #8a8a8a;border-radius:8px;padding:5px 9px;text-align:center;position:relative;z-index:1;
white-space:nowrap}
.module{border-radius:3px}.module>.head{cursor:pointer}.module>.head:before{content:"\\25B8 "}
.open>.head{text-align:left}.open>.head:before{content:"\\25BE "}
.module>.inside{display:none}.open>.inside{display:block;padding:4px 14px 12px}
.cost{color:#5c5c5c}.port{font-size:10px;padding:1px 7px;color:#5c5c5c}.point{width:10px;align-self:stretch}
button{margin:6px 6px 0 0}
text{font:9px system-ui,sans-serif;fill:#5c5c5c}
""".strip()

SCRIPT = """
const graph=JSON.parse(document.getElementById("edges").textContent),picture=document.getElementById("picture");
const at=id=>document.getElementById(id),NS="http://www.w3.org/2000/svg";
function make(kind,values,text){const one=document.createElementNS(NS,kind);
for(const name in values)one.setAttribute(name,values[name]);if(text)one.textContent=text;return one}
function draw(){
 const svg=picture.querySelector("svg"),origin=picture.getBoundingClientRect();
 svg.querySelectorAll("path.edge,text").forEach(one=>one.remove());
 svg.setAttribute("width",picture.scrollWidth);svg.setAttribute("height",picture.scrollHeight);
 const labelled=new Set();
 for(const [chain,label,up] of graph){
  const boxes=chain.map(id=>at(id).getBoundingClientRect());
  const rows=chain.map(id=>at(id).parentElement.getBoundingClientRect());
  if(!boxes[0].width&&!boxes[0].height)continue;
  const points=[];
  boxes.forEach((box,i)=>{const x=box.left+box.width/2-origin.left;
   if(i)points.push([x,rows[i].top-origin.top],[x,box.top-origin.top]);
   if(i<boxes.length-1)points.push([x,box.bottom-origin.top],[x,rows[i].bottom-origin.top])});
  if(up)points.reverse();
  for(let i=points.length-1;i;i--){const [x,y]=points[i-1],[u,v]=points[i];
   if(Math.hypot(u-x,v-y)<1)points.splice(i,1)}
  let d="M"+points[0];
  for(let i=1;i<points.length;i++){const [x,y]=points[i-1],[u,v]=points[i],m=(y+v)/2;
   d+=Math.abs(x-u)<1?"L"+u+" "+v:"C"+x+" "+m+" "+u+" "+m+" "+u+" "+v}
  svg.append(make("path",{d,class:"edge",fill:"none",stroke:"#8a8a8a","marker-end":"url(#arrow)"}));
  if(label&&!labelled.has(chain[0])){labelled.add(chain[0]);
   svg.append(make("text",{x:points[0][0]+5,y:points[0][1]+12},label))}}}
function toggle(module,open){module.classList.toggle("open",open)}
picture.addEventListener("click",event=>{const head=event.target.closest(".module>.head");
 if(head){toggle(head.parentElement);draw()}});
const modules=()=>document.querySelectorAll(".module");
at("unfold").onclick=()=>{modules().forEach(one=>toggle(one,true));draw()};
at("fold").onclick=()=>{modules().forEach(one=>toggle(one,one.dataset.depth==="0"));draw()};
addEventListener("resize",draw);draw();
""".strip()


def as_page(graph: DataflowGraph, root: Box, depth: int) -> str:
    """`root` has nothing folded; modules in fewer than `depth` others are open at first."""
    writer = _Writer(graph)
    picture = "".join(writer.box(root, 0, depth))
    legend = "".join(
        f'<span><i style="background:{colour}"></i>{escape(place)}</span>' for place, colour in writer.colours.items()
    )
    notes = "".join(f"<p>{escape(line)}</p>" for line in [summary(graph), *graph.notes])
    edges = json.dumps(writer.edges).replace("<", "\\u003c")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(graph.model)}</title>'
        f"<style>{STYLE}</style></head>\n<body><h1>{escape(graph.model)}</h1>{notes}"
        f'<div class="legend">{legend}</div>'
        '<button id="unfold">Unfold all</button><button id="fold">Fold all</button>\n'
        f'<div id="picture"><svg xmlns="http://www.w3.org/2000/svg"><defs><marker id="arrow" viewBox="0 0 8 8" '
        'refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="#8a8a8a"/>'
        f"</marker></defs></svg>{picture}</div>\n"
        f'<script type="application/json" id="edges">{edges}</script>\n<script>{SCRIPT}</script></body></html>\n'
    )


class _Writer:
    def __init__(self, graph: DataflowGraph) -> None:
        self.colours = colours_of(graph)
        self.edges: list[tuple[list[str], str, bool]] = []
        """The ids of the boxes and points that an edge passes from top to bottom, its label, whether it goes up."""
        self._ids = count()

    def box(self, box: Box, level: int, depth: int, name: str = "") -> Iterator[str]:
        name = name or self._new_id()
        colour = self.colours.get(box.place, NEUTRAL)
        kind = "port" if box.kind == "port" else "module" if box.children else "operation"
        is_open = " open" if box.children and level <= depth else ""
        shade = f"background:{colour}{'59' if box.children else ''}"
        text = escape(box.title)
        if box.kind not in ("operation", "input", "output", "port") and box.kind != box.title:
            text += f": {escape(box.kind)}"
        cost = f' <span class="cost">{escape(box.cost)}</span>' if box.cost else ""
        yield (
            f'<div class="box {kind}{is_open}" id="{name}" data-depth="{level}" style="{shade}" '
            f'title="{escape(" ".join([box.name, box.place]).strip())}">'
        )
        if not box.children:
            yield f"{text}{'<br>' + cost if cost else ''}</div>"
            return
        yield f'<div class="head">{text}{cost}</div><div class="inside">'
        pairs = [(edge.source, edge.target) for edge in box.edges]
        rows, chains, _ = rows_of(len(box.children), pairs)
        ids = {number: self._new_id() for row in rows for number in row}
        for row in rows:
            yield '<div class="row">'
            for number in row:
                if number < len(box.children):
                    yield from self.box(box.children[number], level + 1, depth, ids[number])
                else:
                    yield f'<div class="point" id="{ids[number]}"></div>'
            yield "</div>"
        for edge, chain in zip(box.edges, chains, strict=True):
            more = f" and {len(edge.tensors) - 1} more" if len(edge.tensors) > 1 else ""
            label = shape_of(edge.tensors[0]) + more if edge.tensors else ""
            assert all(a in ids and b in ids for a, b in pairwise(chain))
            self.edges.append(([ids[number] for number in chain], label, edge.source > edge.target))
        yield "</div></div>"

    def _new_id(self) -> str:
        return f"b{next(self._ids)}"
