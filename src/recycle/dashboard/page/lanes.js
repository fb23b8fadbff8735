// The lane of a worker in the timeline: what it executed and what was planned for it, each a row of ops in order of their starts.

const OP = /^(\d+)([FBIW])(\d+)@(\d+)$/;

export function decode(lane) {
  return { worker: lane.worker, executed: row(lane.worker, lane.executed, lane.critical), planned: row(lane.worker, lane.planned, []) };
}

function row(worker, columns, critical) {
  if (!columns) return null;
  const pipeline = (/^W(\d+)_/.exec(worker) || [])[1];
  const ops = columns.ops ? columns.ops.split(" ").map((full) => {
    const match = OP.exec(full);
    return match ? { full, look: match[2], text: `${match[2]}${match[3]}`, home: match[4], isRerouted: match[4] !== pipeline } : { full, look: full, text: "", isRerouted: false };
  }) : [];
  return { ops, starts: columns.starts, lengths: columns.lengths, vain: new Set(columns.vain), critical: new Set(critical) };
}

// The first op that may end after `from`; rows are in order of their starts.
export function lowerBound(row, from, factor) {
  let low = 0, high = row.starts.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if ((row.starts[middle] + row.lengths[middle]) * factor < from) low = middle + 1; else high = middle;
  }
  return Math.max(0, low - 2);
}

// The op that runs at a time, or else the first after it.
export function opAt(row, time, factor) {
  if (!row || !row.ops.length) return 0;
  const at = row.starts.findIndex((start, index) => (start + row.lengths[index]) * factor > time);
  return at < 0 ? row.ops.length - 1 : at;
}
