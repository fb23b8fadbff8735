// The states of workers: each has a sign and a word beside its colour, for readers who do not see colours.

export const STATES = {
  alive: { sign: "●", word: "live" },
  slow: { sign: "◐", word: "slow" },
  moved: { sign: "⇄", word: "moved" },
  joining: { sign: "+", word: "joining" },
  starting: { sign: "○", word: "starting" },
  suspected: { sign: "?", word: "suspected" },
  dead: { sign: "✕", word: "dead" },
};

export function describeWorker(name, about) {
  const state = STATES[about.state] || { word: about.state };
  const parts = [`${name} ${state.word}`];
  if (about.speed) parts.push(`at ${about.speed} of its peers' speed`);
  if (about.from) parts.push(`came from ${about.from}`);
  if (about.reason) parts.push(about.reason);
  if (about.process) parts.push(about.process);
  return parts.join(", ");
}

export const USES = [
  ["busy", "computing", "alive"],
  ["bubble", "bubble", "bubble"],
  ["redo", "redone", "suspected"],
  ["start", "starting", "joining"],
  ["recovery", "recovering", "dead"],
  ["checkpoint", "checkpoint", "moved"],
  ["down", "down", "faint"],
];
