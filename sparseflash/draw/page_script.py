"""The program of a page, JavaScript without libraries."""

SCRIPT = r"""
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const said = document.getElementById("said");
const bytes = text => Uint8Array.from(atob(text), c => c.charCodeAt(0)).buffer;
const range = (first, size, total) => first + "\u2013" + (Math.min(first + size, total) - 1);
const percent = share => (100 * share).toPrecision(4).replace(/\.?0+$/, "") + " %";
const [blockQ, blockK] = data.block, blocksK = Math.ceil(data.keys / blockK);
const perWord = Math.min(blockK, 32), words = Math.max(1, blockK / 32);
const bits = data.bits === undefined ? null : new Int32Array(bytes(data.bits));
const LEFT = 58, TOP = 8, BOTTOM = 26, RIGHT = 30; // pixels: the last label below is centred at its tick
const SCORE = 2, BORDER = 6; // pixels: the least size of a score, and of a block with borders
const FEW = 1024; // tokens a side: these are shown as scores of any size, as in BlockMask.plot
const MEANINGS = ["empty tile", "partial tile, dead", "partial tile, live", "full tile, live"];
const step = least => { // 1, 2 or 5 times a power of ten
  const ten = 10 ** Math.floor(Math.log10(Math.max(least, 1)));
  return [1, 2, 5, 10].map(n => n * ten).find(n => n >= least);
};
for (const panel of data.panels) {
  const at = new Uint32Array(bytes(panel.at)), live = new Float32Array(bytes(panel.live));
  const full = new Float32Array(bytes(panel.full)), rgb = new Uint8Array(bytes(panel.rgb));
  const where = new Map(), tiles = new Map();
  at.forEach((cell, i) => where.set(cell, i));
  if (bits) {
    const kinds = new Uint32Array(bytes(panel.kinds));
    new Uint32Array(bytes(panel.tiles)).forEach((tile, i) => tiles.set(tile, kinds[i]));
  }
  // The kind of a score, an index into MEANINGS; padding is dead, and a tile past the ends is empty.
  const kind = (q, k) => {
    const i = Math.floor(q / blockQ), j = Math.floor(k / blockK), tile = tiles.get(i * blocksK + j);
    if (tile === undefined || i * blockQ >= panel.ends[0] || j * blockK >= panel.ends[1]) return 0;
    const inside = q < panel.ends[0] && k < panel.ends[1];
    const isCut = (i + 1) * blockQ > panel.ends[0] || (j + 1) * blockK > panel.ends[1];
    if (tile === 0) return isCut ? (inside ? 2 : 1) : 3;
    const x = k % blockK, word = bits[((tile - 1) * blockQ + q % blockQ) * words + Math.floor(x / perWord)];
    return inside && (word >>> (x % perWord)) & 1 ? 2 : 1;
  };
  const source = document.createElement("canvas");
  source.width = panel.cols; source.height = panel.rows;
  const image = new ImageData(panel.cols, panel.rows);
  image.data.fill(255);
  at.forEach((cell, i) => image.data.set(rgb.subarray(3 * i, 3 * i + 3), 4 * cell));
  source.getContext("2d").putImageData(image, 0, 0);
  const figure = document.createElement("figure"), canvas = document.createElement("canvas");
  const caption = document.createElement("figcaption");
  caption.textContent = panel.title;
  figure.append(canvas, caption);
  document.getElementById("panels").append(figure);
  const side = data.panels.length > 1 ? 420 : 640, longest = Math.max(data.queries, data.keys);
  const wide = Math.max(48, side * data.keys / longest), high = Math.max(48, side * data.queries / longest);
  canvas.width = wide + LEFT + RIGHT; canvas.height = high + TOP + BOTTOM;
  let view = { x: 0, y: 0, w: data.keys, h: data.queries }; // the part that is shown, in tokens
  const context = canvas.getContext("2d");
  const showsScores = () => bits !== null
    && (Math.max(view.w, view.h) <= FEW || Math.min(wide / view.w, high / view.h) >= SCORE);
  const drawScores = () => {
    const x0 = Math.floor(view.x), y0 = Math.floor(view.y);
    const w = Math.min(data.keys, Math.ceil(view.x + view.w)) - x0;
    const h = Math.min(data.queries, Math.ceil(view.y + view.h)) - y0;
    const part = document.createElement("canvas");
    part.width = w; part.height = h;
    const scores = new ImageData(w, h);
    scores.data.fill(255);
    for (let q = 0; q < h; q++) for (let k = 0; k < w; k++)
      scores.data.set(data.colours[kind(y0 + q, x0 + k)], 4 * (q * w + k));
    part.getContext("2d").putImageData(scores, 0, 0);
    const sx = wide / view.w, sy = high / view.h;
    context.imageSmoothingEnabled = sx < 1; // smaller than pixels: their mean, not one of them
    context.drawImage(part, (x0 - view.x) * sx, (y0 - view.y) * sy, w * sx, h * sy);
  };
  const line = (x0, y0, x1, y1) => {
    context.beginPath(); context.moveTo(x0, y0); context.lineTo(x1, y1); context.stroke();
  };
  const draw = () => {
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.imageSmoothingEnabled = false;
    context.fillStyle = "#fff";
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.save();
    context.translate(LEFT, TOP);
    context.beginPath(); context.rect(0, 0, wide, high); context.clip();
    if (showsScores()) drawScores();
    else context.drawImage(source, view.x / panel.width, view.y / panel.height, view.w / panel.width,
      view.h / panel.height, 0, 0, wide, high);
    context.strokeStyle = data.grid; context.lineWidth = 1;
    if (blockK * wide / view.w >= BORDER)
      for (let k = Math.ceil(view.x / blockK) * blockK; k <= view.x + view.w; k += blockK)
        line((k - view.x) * wide / view.w, 0, (k - view.x) * wide / view.w, high);
    if (blockQ * high / view.h >= BORDER)
      for (let q = Math.ceil(view.y / blockQ) * blockQ; q <= view.y + view.h; q += blockQ)
        line(0, (q - view.y) * high / view.h, wide, (q - view.y) * high / view.h);
    context.restore();
    context.strokeStyle = "#888"; context.strokeRect(LEFT - 0.5, TOP - 0.5, wide + 1, high + 1);
    context.fillStyle = "#222"; context.font = "11px system-ui, sans-serif";
    context.textAlign = "center"; context.textBaseline = "top";
    const acrossStep = step(view.w * 70 / wide), downStep = step(view.h * 40 / high);
    for (let k = Math.ceil(view.x / acrossStep) * acrossStep; k <= view.x + view.w; k += acrossStep) {
      const x = LEFT + (k - view.x) * wide / view.w;
      line(x, TOP + high, x, TOP + high + 4);
      context.fillText(k.toLocaleString("en"), x, TOP + high + 6);
    }
    context.textAlign = "right"; context.textBaseline = "middle";
    for (let q = Math.ceil(view.y / downStep) * downStep; q <= view.y + view.h; q += downStep) {
      const y = TOP + (q - view.y) * high / view.h;
      line(LEFT - 4, y, LEFT, y);
      context.fillText(q.toLocaleString("en"), LEFT - 7, y);
    }
  };
  const place = event => {
    const box = canvas.getBoundingClientRect(), shrunk = canvas.width / box.width; // on a narrow screen
    return { x: ((event.clientX - box.left) * shrunk - LEFT) / wide,
      y: ((event.clientY - box.top) * shrunk - TOP) / high };
  };
  const move = (x, y) => {
    view.x = Math.min(Math.max(0, x), data.keys - view.w);
    view.y = Math.min(Math.max(0, y), data.queries - view.h);
    draw();
  };
  const zoom = (p, factor) => {
    const x = view.x + p.x * view.w, y = view.y + p.y * view.h;
    const least = Math.min(1, (bits ? 16 : 4 * Math.min(panel.width, panel.height)) / longest);
    const scale = Math.min(1, Math.max(least, view.w / data.keys * factor));
    view.w = data.keys * scale; view.h = data.queries * scale;
    move(x - p.x * view.w, y - p.y * view.h);
  };
  canvas.zoom = zoom; // for tests
  canvas.kind = kind;
  canvas.addEventListener("wheel", event => {
    event.preventDefault();
    zoom(place(event), Math.exp(event.deltaY / 400));
  }, { passive: false });
  let held = null;
  canvas.addEventListener("pointerdown", event => {
    held = { ...place(event), from: { ...view } };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointerup", () => { held = null; });
  canvas.addEventListener("dblclick", () => { view = { x: 0, y: 0, w: data.keys, h: data.queries }; draw(); });
  canvas.addEventListener("pointermove", event => {
    const p = place(event);
    if (held) move(held.from.x - (p.x - held.x) * view.w, held.from.y - (p.y - held.y) * view.h);
    const k = Math.floor(view.x + p.x * view.w), q = Math.floor(view.y + p.y * view.h);
    if (k < 0 || q < 0 || k >= data.keys || q >= data.queries) return;
    if (showsScores()) {
      said.textContent = "query " + q + ", key " + k + ": " + MEANINGS[kind(q, k)];
      return;
    }
    const col = Math.floor(k / panel.width), row = Math.floor(q / panel.height);
    const i = where.get(row * panel.cols + col);
    const share = i === undefined ? 0 : live[i], whole = i === undefined ? 0 : full[i];
    const words = share === 0 ? "empty" : whole >= share ? "full tiles"
      : whole === 0 ? "partial tiles" : "full and partial tiles";
    said.textContent = "queries " + range(row * panel.height, panel.height, data.queries) + ", keys "
      + range(col * panel.width, panel.width, data.keys) + ": " + percent(share) + " live, " + words;
  });
  draw();
}
"""
