// Pictures: ticks in time, states in time, blocks. Colours come from the style sheet, so that dark and light agree.

/** A canvas's context, scaled to the screen's pixels, and its size in CSS pixels. */
function open(canvas) {
  const { width, height } = canvas.getBoundingClientRect();
  const scale = devicePixelRatio || 1;
  const [wide, high] = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== wide || canvas.height !== high) Object.assign(canvas, { width: wide, height: high });
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

function colour(canvas, name) {
  return getComputedStyle(canvas).getPropertyValue(`--${name}`).trim();
}

/** A thin line for each token, over `span` ms. */
export function paintTicks(canvas, arrivals, span) {
  const { context, width, height } = open(canvas);
  context.fillStyle = colour(canvas, "accent");
  for (const at of arrivals) context.fillRect((at / span) * (width - 2), 3, 1.25, height - 6);
}

/** Coloured stretches of a stream's states over the last `span` ms: `changes` are [ms, state], in order. */
export function paintStates(canvas, changes, now, span) {
  const { context, width, height } = open(canvas);
  const begin = Math.max(0, now - span);
  const place = (ms) => Math.max(0, ((ms - begin) / span) * width);
  changes.forEach(([at, state], n) => {
    const from = place(at), until = place(changes[n + 1]?.[0] ?? now);
    context.fillStyle = colour(canvas, state);
    context.fillRect(from, 3, until - from, height - 6);
  });
}

const CELL_PX = 9;

/** A grid of the pool's blocks: used, cached, free. Where there are more than cells, a cell stands for several. */
export function paintBlocks(canvas, { used, cached, free }) {
  const { context, width, height } = open(canvas);
  const columns = Math.max(1, Math.floor(width / CELL_PX)), rows = Math.max(1, Math.floor(height / CELL_PX));
  const all = used + cached + free;
  const cells = Math.min(all, columns * rows);
  const share = Math.max(1, all) / Math.max(1, cells);
  // What is there at all is seen: a single used block among thousands has a cell of its own.
  const usedCells = Math.ceil(used / share);
  const heldCells = Math.min(cells, usedCells + Math.ceil(cached / share));
  const [usedColour, cachedColour, freeColour] = ["accent", "accent-soft", "cell"].map((name) => colour(canvas, name));
  for (let n = 0; n < cells; n++) {
    context.fillStyle = n < usedCells ? usedColour : n < heldCells ? cachedColour : freeColour;
    context.fillRect((n % columns) * CELL_PX, Math.floor(n / columns) * CELL_PX, CELL_PX - 2, CELL_PX - 2);
  }
}
