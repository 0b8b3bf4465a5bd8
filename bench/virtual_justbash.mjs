// Runs scripts in just-bash for bench/virtual.py: one JSON request per line in, one response per line out.
//
//   node virtual_justbash.mjs <folder with node_modules> <JSON file of path -> contents>
//
// A request is {script, repeats}; the response is {stdout, exitCode, milliseconds: [...]}, each
// time taken inside this process, around `exec` alone.

import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { join } from "node:path";
import { createInterface } from "node:readline";

const [folder, dataFile] = process.argv.slice(2);
const { Bash } = createRequire(join(folder, "package.json"))("just-bash");
const bash = new Bash({
  files: JSON.parse(readFileSync(dataFile, "utf8")),
  // By default the loops of 100,000 end with an error just before their end.
  executionLimits: { maxCommandCount: 1_000_000, maxLoopIterations: 1_000_000 },
});

for await (const line of createInterface({ input: process.stdin })) {
  const { script, repeats } = JSON.parse(line);
  const milliseconds = [];
  let result;
  for (let n = 0; n < repeats; n++) {
    const start = performance.now();
    result = await bash.exec(script);
    milliseconds.push(performance.now() - start);
  }
  const { stdout, exitCode } = result;
  process.stdout.write(JSON.stringify({ stdout, exitCode, milliseconds }) + "\n");
}
