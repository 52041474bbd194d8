// Prints name, version and licence text of every package that esbuild put into plot.js; run by `make report-page`.
const fs = require("fs"), path = require("path");
const { inputs } = JSON.parse(fs.readFileSync("meta.json")).outputs["plot.js"];
const used = Object.entries(inputs).filter(([, one]) => one.bytesInOutput > 0).map(([file]) => file);
const folders = new Set(used.flatMap((file) => file.match(/^node_modules\/(?:@[^/]+\/)?[^/]+/)?.[0] ?? []));
for (const folder of [...folders].sort()) {
  const { name, version, license } = JSON.parse(fs.readFileSync(path.join(folder, "package.json")));
  const text = fs.readdirSync(folder).find((file) => /^licen[cs]e/i.test(file));
  if (!text) throw new Error(`${name} ships no licence text`);
  console.log(`${name} ${version} (${license})\n\n${fs.readFileSync(path.join(folder, text), "utf8").trim()}\n\n${"-".repeat(80)}\n`);
}
