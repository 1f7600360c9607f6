// A chart, its legend with the values under the pointer (or the latest), and the same numbers as a table.

import { useEffect, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import { clock } from "./format.js";

const TABLE_ROWS = 12;
const charts = new Set();
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** After a change of colours. */
export const redrawAll = () => charts.forEach((chart) => chart.redraw(false));

const axis = (more) => ({
  stroke: () => css("--muted"), font: "11px system-ui, sans-serif", grid: { stroke: () => css("--line"), width: 1 },
  ticks: { show: false }, gap: 4, ...more,
});

function options(series, { width, height, format, window, stepped, numeric, onPoint }) {
  return {
    width, height, padding: [8, 20, 0, 0], legend: { show: false },
    cursor: { points: { size: 6 }, drag: { setScale: false, x: false, y: false }, y: false },
    scales: {
      x: numeric ? { time: false, range: (u, min, max) => [0, Math.max(2, max * 1.05)] }
        : { time: true, range: (u, min, max) => [Math.max((max ?? 0) - window, Math.min(min ?? 0, (max ?? 0) - 60)), max ?? 0] },
      y: { range: (u, min, max) => [0, max > 0 ? max * 1.12 : 1] },
    },
    axes: [axis({ space: 70, size: 26, ...(numeric ? {} : { values: (u, at) => at.map((t) => clock(t).slice(0, window > 400 ? 5 : 8)) }) }),
      axis({ space: 36, size: 58, values: (u, at) => at.map(format) })],
    series: [{}, ...series.map((one) => ({
      label: one.label, stroke: () => css(one.color), width: one.width ?? 1.75, dash: one.dash, spanGaps: false,
      fill: one.fill ? () => css(one.fill) : undefined, points: { show: one.points ?? false, size: 6, fill: () => css(one.color) },
      paths: stepped && !one.smooth ? uPlot.paths.stepped({ align: 1 }) : undefined,
    }))],
    hooks: { setCursor: [(u) => onPoint(u.cursor.idx ?? null)] },
  };
}

/** x: numbers.  series: [{label, color (a CSS variable), values, shown (texts of legend and table), dash, fill}].  summary: what a
 *  screen reader reads. */
export function Chart({ name, x, series, format, window = 300, height = 190, stepped, numeric, summary, xName = "time" }) {
  const box = useRef(null);
  const plot = useRef(null);
  const [point, setPoint] = useState(null);
  const [asTable, setAsTable] = useState(false);
  const shape = JSON.stringify([window, stepped, numeric, series.map((one) => [one.label, one.color, one.dash, one.fill, one.points])]);
  const data = [x, ...series.map((one) => one.values)];

  useEffect(() => {
    if (asTable) return undefined;
    const width = Math.max(200, box.current.clientWidth);
    const chart = new uPlot(options(series, { width, height, format, window, stepped, numeric, onPoint: setPoint }), data, box.current);
    plot.current = chart;
    charts.add(chart);
    const watch = new ResizeObserver(([entry]) => {
      const wide = Math.round(entry.contentRect.width);
      if (wide > 0 && wide !== chart.width) chart.setSize({ width: wide, height });
    });
    watch.observe(box.current);
    return () => {
      watch.disconnect();
      charts.delete(chart);
      chart.destroy();
      plot.current = null;
    };
  }, [shape, asTable]);
  useEffect(() => {
    if (plot.current) plot.current.setData(data);
  });

  const at = point !== null && point < x.length ? point : x.length - 1;
  const value = (one, i) => (one.shown ?? one.values)[i];
  const label = (i) => (numeric ? String(x[i]) : clock(x[i]));
  return (
    <div class="chart">
      <ul class="legend">
        {series.map((one) => (
          <li key={one.label}>
            <i class={one.dash ? "swatch dashed" : "swatch"} style={{ background: `var(${one.color})`, color: `var(${one.color})` }} aria-hidden="true" />
            <span>{one.label}</span> <b>{at >= 0 && value(one, at) != null ? format(value(one, at)) : "–"}</b>
          </li>
        ))}
        <li class="push">
          {point !== null && at >= 0 && <span class="muted">{label(at)}</span>}{" "}
          <button type="button" class="small" aria-pressed={asTable} onClick={() => setAsTable(!asTable)} aria-label={`${name} as a table`}>
            table
          </button>
        </li>
      </ul>
      {asTable ? (
        <div class="scroll" style={{ height: `${height}px` }} tabIndex={0} role="group" aria-label={`${name}, table`}>
          <table>
            <thead>
              <tr><th scope="col">{xName}</th>{series.map((one) => <th scope="col" class="n" key={one.label}>{one.label}</th>)}</tr>
            </thead>
            <tbody>
              {x.map((_, i) => i).slice(-TABLE_ROWS).reverse().map((i) => (
                <tr key={x[i]}>
                  <th scope="row">{label(i)}</th>
                  {series.map((one) => <td class="n" key={one.label}>{value(one, i) == null ? "–" : format(value(one, i))}</td>)}
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      ) : (
        <div class="plot" ref={box} role="img" aria-label={`${name}. ${summary}`} style={{ height: `${height}px` }} />
      )}
    </div>
  );
}

/** Columns of rows by time; a gap where the server sent nothing. */
export function columns(rows, reads) {
  const x = [];
  const found = reads.map(() => []);
  let before = null;
  for (const row of rows) {
    if (before !== null && row.t - before.t > 2.5 * Math.max(row.dt, before.dt)) {
      x.push(before.t + before.dt);
      found.forEach((values) => values.push(null));
    }
    x.push(row.t);
    reads.forEach((read, i) => found[i].push(read(row) ?? null));
    before = row;
  }
  return [x, ...found];
}
