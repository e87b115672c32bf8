const charts = JSON.parse(document.getElementById("data").textContent).charts;
const sum = row => row.reduce((a, b) => a + b, 0);
const most = Math.max(...charts.flatMap(c => c.rows.map(sum)), 1);
const human = n => {
  let unit = 0;
  while (Math.abs(n) >= 1024 && unit < 4) { n /= 1024; unit++; }
  return (unit ? n.toPrecision(3) : n) + " " + ["B", "KiB", "MiB", "GiB", "TiB"][unit];
};
const hover = document.getElementById("hover");
document.querySelectorAll("canvas").forEach((canvas, k) => {
  const c = charts[k], left = 70, bottom = 24, top = 6;
  const last = c.times[c.times.length - 1] || 1e-6;
  let X, Y, width, height;
  const draw = at => {
    const ratio = window.devicePixelRatio || 1, p = canvas.getContext("2d");
    width = canvas.clientWidth; height = canvas.clientHeight;
    canvas.width = width * ratio; canvas.height = height * ratio;
    p.scale(ratio, ratio);
    X = t => left + (width - left - 8) * t / last;
    Y = n => top + (height - top - bottom) * (1 - n / most);
    const base = c.rows.map(() => 0);
    c.names.forEach((name, s) => {
      p.fillStyle = c.colours[s];
      p.beginPath();
      c.times.forEach((t, i) => {  // a sum holds until the next point
        p.lineTo(X(t), Y(base[i] + c.rows[i][s]));
        p.lineTo(X(i + 1 < c.times.length ? c.times[i + 1] : last), Y(base[i] + c.rows[i][s]));
      });
      for (let i = c.times.length - 1; i >= 0; i--) {
        p.lineTo(X(i + 1 < c.times.length ? c.times[i + 1] : last), Y(base[i]));
        p.lineTo(X(c.times[i]), Y(base[i]));
      }
      p.fill();
      c.rows.forEach((row, i) => base[i] += row[s]);
    });
    p.fillStyle = p.strokeStyle = "#555";
    p.font = "12px system-ui, sans-serif";
    for (let i = 0; i <= 4; i++) {
      p.textAlign = "right"; p.fillText(human(most * i / 4), left - 6, Y(most * i / 4) + 4);
      p.textAlign = i < 4 ? "left" : "right";
      p.fillText((last * i / 4).toPrecision(3) + " s", X(last * i / 4), height - 6);
    }
    c.marks.filter(m => m[0] >= 0 && m[0] <= last).forEach(m => {
      p.globalAlpha = .5; p.fillRect(X(m[0]), top, 1, height - top - bottom); p.globalAlpha = 1;
      p.textAlign = "left"; p.fillText(m[1], X(m[0]) + 3, top + 10);
    });
    if (at !== undefined) p.fillRect(X(c.times[at]), top, 1, height - top - bottom);
  };
  const tell = at => {
    draw(at);
    hover.textContent = c.title + ", " + c.times[at].toFixed(4) + " s: " + human(sum(c.rows[at])) + "\n";
    c.names.map((name, s) => [c.rows[at][s], name, c.colours[s]]).filter(x => x[0]).sort((a, b) => b[0] - a[0])
      .forEach(([size, name, colour]) => {
        const box = document.createElement("i");
        box.style.background = colour;
        hover.append(box, human(size) + "  " + name + "\n");
      });
  };
  canvas.addEventListener("mousemove", event => {
    const t = (event.offsetX - left) / (width - left - 8) * last;
    let at = 0;
    c.times.forEach((time, i) => { if (time <= t) at = i; });
    tell(at);
  });
  addEventListener("resize", () => draw());
  draw();
  if (k === 0) tell(c.rows.map(sum).reduce((best, n, i, all) => n > all[best] ? i : best, 0));
});
