// The report: draws the index, filters questions and shows one of them. Texts are set as text, never as markup.
const unpack = async (id) => {
  const bytes = Uint8Array.from(atob(document.getElementById(id).textContent), (c) => c.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
};
const el = (name, attributes = {}, ...children) => {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes))
    key.startsWith("on") ? node.addEventListener(key.slice(2), value) : node.setAttribute(key, value);
  node.append(...children.map((child) => (typeof child === "number" ? String(child) : child)));
  return node;
};
const $ = (id) => document.getElementById(id);
const show = (value, digits = 3) => (value === null || value === undefined ? "–" : value.toFixed(digits));

const index = await unpack("index");
const { systems, tests, confidences, questions } = index;
const tasks = [...new Set(questions.map((question) => question.k))];
const state = { test: -1, task: "", confidence: 0, search: "", verdict: "", low: 0, high: 1, agreement: 1, order: "wrong", bin: null, at: -1 };
const PAGE = 100;
let found = [], shown = PAGE;

// ---- votes. A run is {a: answer of each sample (-1: unreadable), c: 1, 0 or -1, p: confidences by name, n, f}.
function vote(run, count, weights) {
  const sums = new Map();
  for (let i = 0; i < Math.min(count, run.a.length); i++) {
    if (run.a[i] < 0) continue;
    const weight = weights ? weights[i] ?? 0 : 1;
    const group = sums.get(run.a[i]) ?? { answer: run.a[i], votes: 0, weight: 0, correct: run.c[i], samples: [] };
    group.votes += 1; group.weight += weight; group.samples.push(i);
    sums.set(run.a[i], group);
  }
  return [...sums.values()].sort((x, y) => y.weight - x.weight || y.votes - x.votes);
}
const weightsOf = (run) => run.p[state.confidence];
function summarise(question) {
  question.now = question.s.map((run) => {
    if (!run) return null;
    const groups = vote(run, run.a.length, weightsOf(run)), best = groups[0];
    const total = groups.reduce((sum, group) => sum + group.weight, 0);
    const values = best ? best.samples.map((i) => weightsOf(run)?.[i]).filter((v) => v !== null && v !== undefined) : [];
    return {
      best: best ?? null, correct: best ? best.correct : run.c.includes(-1) ? -1 : 0,
      sure: values.length ? values.reduce((a, b) => a + b, 0) / values.length : null,
      share: best && total ? best.weight / total : 0, agreement: best ? best.votes / run.a.length : 0,
    };
  });
}

// ---- filters
const last = (question) => question.now.findLast((one) => one !== null);
const flipped = (question) => question.now.length > 1 && question.now[0] && question.now[1] &&
  question.now[0].correct !== question.now[1].correct;
function passes(question) {
  const end = last(question);
  if (!end || (state.test >= 0 && question.t !== state.test)) return false;
  if (state.task !== "" && question.k !== state.task) return false;
  if (state.verdict === "flipped" ? !flipped(question) : state.verdict !== "" && end.correct !== Number(state.verdict)) return false;
  if (end.sure !== null && (end.sure < state.low || end.sure > state.high)) return false;
  if (end.agreement > state.agreement) return false;
  if (state.bin && !inBin(question)) return false;
  return state.search === "" || question.q.toLowerCase().includes(state.search) || question.id.toLowerCase().includes(state.search);
}
function inBin(question) {
  const run = question.s[state.bin.system];
  return run && (weightsOf(run) ?? []).some((value) => value !== null && binOf(value) === state.bin.bin);
}
const ORDERS = {
  wrong: (q) => { const end = last(q); return (end.correct === 0 ? 2 : end.correct === 1 ? 0 : 1) + (end.sure ?? 0) * (end.correct === 0 ? 1 : -1); },
  unsure: (q) => -Math.abs((last(q).sure ?? 0.5) - 0.5), split: (q) => -last(q).agreement, order: () => 0,
};
function refresh() {
  const key = ORDERS[state.order];
  found = questions.filter(passes).map((question) => [key(question), question]).sort((x, y) => y[0] - x[0]).map((pair) => pair[1]);
  shown = PAGE;
  state.at = -1;
  drawList();
}
function drawList() {
  $("count").textContent = `${found.length.toLocaleString("en")} of ${questions.length.toLocaleString("en")} questions` +
    (state.bin ? `, with a response in [${(state.bin.bin / 10).toFixed(1)}, ${((state.bin.bin + 1) / 10).toFixed(1)}]` : "");
  $("list").replaceChildren(...found.slice(0, shown).map((question, place) => {
    const marks = question.now.map((one, system) => one === null ? "" : el("span", { class: mark(one.correct) },
      ` ${sign(one.correct)} ${show(one.sure, 2)}${systems.length > 1 && system === 0 ? " →" : ""}`));
    return el("li", { role: "option", tabindex: 0, "aria-selected": place === state.at, onclick: () => open(place) },
      el("span", { class: "q" }, question.q), ...marks, el("span", { class: "soft" }, ` ${tests[question.t]}`));
  }));
  $("more").hidden = found.length <= shown;
}
const sign = (correct) => (correct === 1 ? "✓" : correct === 0 ? "✗" : "?");
const mark = (correct) => (correct === 1 ? "right" : correct === 0 ? "wrong" : "soft");

// ---- one question
const chunks = new Map();
async function textsOf(question) {
  if (index.redacted) return null;
  const number = Math.floor(question.i / index.chunk);
  if (!chunks.has(number)) chunks.set(number, unpack(`c${number}`));
  return (await chunks.get(number))[question.i % index.chunk];
}
async function open(place) {
  if (place < 0 || place >= found.length) return;
  if (place >= shown) shown = place + PAGE;
  state.at = place;
  drawList();
  $("list").children[place].scrollIntoView({ block: "nearest" });
  const question = found[place], texts = await textsOf(question);
  const most = Math.max(...question.s.map((run) => (run ? run.a.length : 0)));
  const slider = el("input", { type: "range", min: 1, max: most, value: most, id: "slider", oninput: draw });
  const threshold = el("input", { type: "number", min: 0, max: 1, step: 0.01, value: index.threshold, id: "threshold", oninput: draw });
  const body = el("div", { class: "columns" });
  function draw() {
    $("seen").textContent = slider.value;
    body.replaceChildren(...question.s.map((run, system) => run
      ? drawRun(question, run, system, Number(slider.value), Number(threshold.value), texts?.s[system], texts?.l[system]) : el("section")));
  }
  $("detail").replaceChildren(
    el("h2", {}, question.id), el("div", { class: "text" }, texts ? texts.q : question.q),
    el("p", {}, "Reference: ", el("b", {}, question.r ?? "unknown")), why(question),
    el("div", { class: "filters" }, el("label", {}, el("span", {}, "samples seen: ", el("b", { id: "seen" })), slider),
      el("label", {}, "stop at a confidence of", threshold)), body);
  draw();
}
function why(question) {
  if (!flipped(question)) return "";
  const [before, after] = question.now;
  const name = (one) => (one.best ? question.a[one.best.answer] : "nothing");
  const same = before.best && after.best && before.best.votes === after.best.votes;
  return el("p", { id: "why" }, `${systems[0]} answers ${name(before)} ${sign(before.correct)}, ${systems[1]} answers ${name(after)} ` +
    `${sign(after.correct)}: ${same ? "the votes are as many, " : ""}their weights changed from ${show(before.share, 2)} to ${show(after.share, 2)} of all.`);
}
function drawRun(question, run, system, seen, threshold, texts, tokens) {
  const weights = weightsOf(run), groups = vote(run, seen, weights);
  const total = groups.reduce((sum, group) => sum + group.weight, 0) || 1;
  const stop = (weights ?? []).findIndex((value, i) => i < seen && run.a[i] >= 0 && value !== null && value >= threshold);
  const rule = stop >= 0
    ? `Stops after sample ${stop + 1} with ${question.a[run.a[stop]]} ${sign(run.c[stop])}`
    : `Does not stop within ${seen}; the vote is ${groups[0] ? `${question.a[groups[0].answer]} ${sign(groups[0].correct)}` : "empty"}`;
  return el("section", {},
    el("h2", { class: `s${system}` }, systems[system]), el("p", { class: "rule" }, rule),
    el("table", {}, el("tr", {}, ...["answer", "votes", "weight"].map((name) => el("th", {}, name))),
      ...groups.map((group) => el("tr", {},
        el("td", { class: mark(group.correct) }, `${sign(group.correct)} ${question.a[group.answer]}`), el("td", {}, group.votes),
        el("td", { class: `s${system}` }, el("span", { class: "bar", style: `width:${(group.weight / total) * 4}rem` }), ` ${show(group.weight / total, 2)}`)))),
    ...run.a.map((answer, i) => el("details", { class: i < seen ? "" : "unseen" },
      el("summary", {}, `${i + 1}. `, el("span", { class: mark(run.c[i]) }, `${sign(run.c[i])} ${answer < 0 ? "unreadable" : question.a[answer]}`),
        el("span", { class: "soft" }, ` ${confidences.map((name, k) => `${name} ${show(run.p[k]?.[i])}`).join(", ")}` +
          `${run.n[i] === null ? "" : `, ${run.n[i]} tokens`}${run.f[i] ? ", cut" : ""}`)),
      el("div", { class: "text" }, ...(texts ? coloured(texts[i], tokens?.[i]) : ["texts were left out (--redact)"])))));
}
const LEVELS = [Math.log(0.9), Math.log(0.5), Math.log(0.1)]; // below .9, .5 and .1 a token has another colour
function coloured(text, tokens) {
  if (!tokens) return [text];
  const characters = [...text];
  let start = 0;
  const spans = tokens[0].map((length, k) => {
    const piece = characters.slice(start, (start += length)).join(""), level = LEVELS.filter((limit) => tokens[1][k] < limit).length;
    return el("span", { class: `p${level}`, title: `log-probability ${tokens[1][k].toFixed(2)}, probability ${Math.exp(tokens[1][k]).toFixed(2)}` }, piece);
  });
  return [...spans, characters.slice(start).join("")];
}

// ---- plots, by Observable Plot (plot.js)
const EDGES = Array.from({ length: 10 }, (_, bin) => bin * 0.1);
const binOf = (value) => { let bin = 9; while (bin > 0 && value < EDGES[bin]) bin -= 1; return bin; };
function responses(system) {
  const rows = [];
  for (const question of questions) {
    const run = question.s[system];
    if (!run || (state.test >= 0 && question.t !== state.test)) continue;
    run.a.forEach((_, i) => { const value = weightsOf(run)?.[i]; if (value !== null && value !== undefined && run.c[i] >= 0) rows.push([value, run.c[i]]); });
  }
  return rows;
}
function drawPlots() {
  const all = systems.map((_, system) => responses(system));
  const bins = all.map((rows) => {
    const sums = Array.from({ length: 10 }, () => ({ count: 0, correct: 0, sure: 0 }));
    for (const [value, correct] of rows) { const bin = sums[binOf(value)]; bin.count += 1; bin.correct += correct; bin.sure += value; }
    return sums;
  });
  const share = (label) => ({ label, domain: [0, 1], ticks: 5 });
  const draw = (name, x, y, marks) => Plot.plot({ width: 300, height: 240, ariaLabel: name, x, y: { ...share(y), grid: true }, marks });
  const colour = (system) => `var(--s${system})`;
  const bars = bins.map((sums, system) => sums.map((bin, number) => ({
    system, number, left: (number + system / systems.length) / 10, right: (number + (system + 1) / systems.length) / 10, share: bin.correct / bin.count,
    text: `${systems[system]}: ${bin.count} responses, confidence ${show(bin.sure / bin.count)}, right ${show(bin.correct / bin.count)}`,
  })).filter((bar) => sums[bar.number].count > 0));
  const reliability = draw("Reliability diagram", share("confidence"), "share right", [
    Plot.link([0], { x1: 0, y1: 0, x2: 1, y2: 1, stroke: "var(--soft)", strokeDasharray: "2 3" }),
    ...bars.map((rows, system) => Plot.rect(rows, {
      x1: "left", x2: "right", y1: 0, y2: "share", insetTop: -1, insetRight: 1, fill: colour(system), title: "text", className: "bins" }))]);
  reliability.querySelectorAll(".bins").forEach((group, system) => group.querySelectorAll("rect").forEach((rect, i) => {
    const bar = bars[system][i], pick = () => choose(system, bar.number);
    for (const [key, value] of Object.entries({ class: "bin", tabindex: 0, "data-bin": bar.number, "data-system": system })) rect.setAttribute(key, value);
    rect.addEventListener("click", pick);
    rect.addEventListener("keydown", (event) => { if (event.key === "Enter") pick(); });
  }));
  const risk = all.map((rows, system) => {
    const order = [...rows].sort((x, y) => y[0] - x[0]), points = [], step = Math.max(1, Math.floor(order.length / 200));
    let wrong = 0;
    order.forEach(([, correct], i) => { wrong += 1 - correct; if (i % step === 0 || i === order.length - 1) points.push([(i + 1) / order.length, wrong / (i + 1)]); });
    return Plot.line(points, { stroke: colour(system), strokeWidth: 2 });
  });
  const most = questions.reduce((longest, question) => Math.max(longest, ...question.s.map((run) => run?.a.length ?? 0)), 1);
  const counts = Array.from({ length: Math.floor(Math.log2(most)) + 1 }, (_, power) => 2 ** power);
  const votes = systems.flatMap((_, system) => [true, false].map((weighted) => {
    const judged = questions.filter((question) => question.s[system] && (state.test < 0 || question.t === state.test) && !question.s[system].c.includes(-1));
    const points = judged.length === 0 ? [] : counts.map((count) => [count, judged.filter((question) =>
      vote(question.s[system], count, weighted ? weightsOf(question.s[system]) : null)[0]?.correct === 1).length / judged.length]);
    return Plot.line(points, { stroke: colour(system), strokeWidth: 2, strokeDasharray: weighted ? null : "4 3" });
  }));
  const figure = (text, plot) => el("figure", {}, el("figcaption", {}, text), plot);
  $("plots").replaceChildren(
    figure("Reliability (click a bar for its responses)", reliability),
    figure("Risk of the most confident responses", draw("Risk over coverage", share("share answered"), "share wrong", risk)),
    figure("Accuracy of votes, in recorded order: weighted, plain (dashed)", draw("Accuracy of votes over samples",
      { label: "samples", type: "log", base: 2, domain: [1, Math.max(most, 2)], ticks: counts, tickFormat: String }, "accuracy", votes)));
}
function choose(system, bin) {
  state.bin = state.bin && state.bin.system === system && state.bin.bin === bin ? null : { system, bin };
  refresh();
}

// ---- the page
function numbers() {
  const head = ["test", "system", "questions", "responses", "right", "ECE", "AUROC", "Brier"];
  return el("table", { id: "numbers" }, el("tr", {}, ...head.map((name) => el("th", {}, name))), ...index.numbers.map((row) =>
    el("tr", {}, ...[row.test, row.system, row.questions, row.responses].map((value) => el("td", {}, value)),
      ...["pass_at_1", "ece", "auroc", "brier"].map((name) => {
        const [value, low, high] = row[name] ?? [null, null, null];
        return el("td", { "data-key": `own.${row.test}.${name}.${row.system}` }, show(value),
          el("span", { class: "soft" }, low === null || low === undefined ? "" : ` [${show(low)}, ${show(high)}]`));
      }))));
}
function choice(name, id, options, change) {
  return el("label", {}, name, el("select", { id, onchange: (event) => change(event.target.value) },
    ...options.map(([value, text]) => el("option", { value }, text))));
}
function number(name, id, key, value) {
  return el("label", {}, name, el("input", { type: "number", min: 0, max: 1, step: 0.05, value, id,
    oninput: (event) => { state[key] = Number(event.target.value); refresh(); } }));
}
document.getElementById("app").replaceChildren(
  el("h1", {}, index.title), ...index.sentences.map((text) => el("p", { class: "verdict" }, text)),
  el("p", { class: "soft" }, ...systems.map((name, system) => el("span", { class: `s${system}` }, `■ ${name}  `)),
    "This file is complete: it loads nothing from the network."),
  index.coloured ? el("p", { class: "soft", id: "legend" }, "Tokens by probability: ", ...["above .9", ".5 to .9", ".1 to .5", "below .1"].flatMap((text, k) =>
    [el("span", { class: `p${k}` }, text), "  "])) : "",
  numbers(), el("div", { id: "plots", class: "plots" }),
  el("div", { class: "filters" },
    el("label", {}, "search ( / )", el("input", { type: "search", id: "search", oninput: (event) => { state.search = event.target.value.toLowerCase(); refresh(); } })),
    choice("test", "test", [[-1, "all"], ...tests.map((name, i) => [i, name])], (value) => { state.test = Number(value); drawPlots(); refresh(); }),
    ...(tasks.length > 1 ? [choice("task", "task", [["", "all"], ...tasks.map((name) => [name, name])], (value) => { state.task = value; refresh(); })] : []),
    choice("verdict", "verdict", [["", "all"], ["0", "wrong"], ["1", "right"], ...(systems.length > 1 ? [["flipped", "flipped"]] : [])], (value) => { state.verdict = value; refresh(); }),
    number("confidence from", "low", "low", 0), number("to", "high", "high", 1), number("agreement up to", "agreement", "agreement", 1),
    choice("order", "order", [["wrong", "confidently wrong first"], ["unsure", "least sure first"], ["split", "most split first"], ["order", "as recorded"]], (value) => { state.order = value; refresh(); }),
    ...(confidences.length > 1 ? [choice("confidence", "confidence", confidences.map((name, i) => [i, name]), (value) => { state.confidence = Number(value); questions.forEach(summarise); drawPlots(); refresh(); })] : []),
    el("span", { id: "count", class: "soft", "aria-live": "polite" })),
  el("main", {}, el("div", {}, el("ul", { id: "list", role: "listbox" }), el("button", { id: "more", onclick: () => { shown += PAGE; drawList(); } }, "more")),
    el("div", { id: "detail" }, el("p", { class: "soft" }, "Choose a question (j and k go down and up)."))));
document.addEventListener("keydown", (event) => {
  if (event.target.matches("input, select") && event.key !== "Escape") return;
  if (event.key === "/") { event.preventDefault(); $("search").focus(); }
  else if (event.key === "Escape") event.target.blur();
  else if (event.key === "j" || event.key === "k") open(Math.max(0, state.at + (event.key === "j" ? 1 : -1)));
  else if (event.key === "Enter" && event.target.matches("#list li")) event.target.click();
});
questions.forEach((question, i) => { question.i = i; summarise(question); });
drawPlots();
refresh();
