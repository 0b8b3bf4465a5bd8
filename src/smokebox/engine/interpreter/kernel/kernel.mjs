// The kernel of JavaScript and TypeScript contexts, which runs inside the sandbox: on Deno, or
// on Node. It is told what to run through descriptor 3, line by line, and tells what came of it
// through 4; see wire.py for the frames. The names of the code stay as those of a REPL do.

import fs from "node:fs";
import inspector from "node:inspector";
import module from "node:module";
import process from "node:process";
import { inspect, format } from "node:util";

const FULL = 1 << 15;
const GATHER = 4;
const LATER = 100;
const LARGEST = 16 << 20;
const LONGEST_TEXT = 1 << 20;
const LONGEST_MESSAGE = 1 << 14;
const LONGEST_TRACEBACK = 1 << 17;
const DISPLAY = Symbol.for("Jupyter.display");
const onDeno = typeof globalThis.Deno !== "undefined";
const typed = process.argv[2] === "typescript";

const frames = fs.openSync("/proc/self/fd/4", "w");
let id = "";
let count = 0;
let interrupt = null;
let written = [];
let size = 0;
let flushed = 0;
let timer = null;
let running = false;
let showing = [];

// Half of a surrogate pair is no text, and nobody could read the line.
const wellFormed = (_, value) => (typeof value === "string" ? value.toWellFormed() : value);

function send(type, fields) {
  const line = Buffer.from(JSON.stringify({ type, id, ...fields }, wellFormed) + "\n");
  for (let at = 0; at < line.length; ) at += fs.writeSync(frames, line, at);
}

// What code writes. At once after a silence, as code that never waits gives no timer a chance.
function write(stream, data) {
  const last = written.at(-1);
  if (last?.stream === stream) last.data += data;
  else written.push({ stream, data });
  size += data.length;
  if (running && (size >= FULL || Date.now() - flushed > GATHER)) flush();
  else timer ??= setTimeout(flush, GATHER);
}

function flush() {
  clearTimeout(timer);
  timer = null;
  if (!running) {
    // For the next code; not for ever.
    while (size > 2 * FULL) size -= written.shift().data.length;
    return;
  }
  flushed = Date.now();
  for (const { stream, data } of written) send("output", { stream, data });
  written = [];
  size = 0;
}

function taking(stream) {
  const decoder = new TextDecoder();
  return (data) => write(stream, typeof data === "string" ? data : decoder.decode(data, { stream: true }));
}

function redirect() {
  for (const name of ["stdout", "stderr"]) {
    const take = taking(name);
    process[name].write = (data, encoding, done) => {
      take(data);
      const call = typeof encoding === "function" ? encoding : done;
      if (call) queueMicrotask(call);
      return true;
    };
    if (!onDeno) continue;
    const length = (data) => (take(data), data.length);
    Object.assign(Deno[name], { writeSync: length, write: (data) => Promise.resolve(length(data)) });
  }
  let depth = 0;
  const say = (stream, ...args) => {
    const text = format(...args);
    write(stream, (depth ? text.replaceAll(/^/gm, "  ".repeat(depth)) : text) + "\n");
  };
  const out = (...args) => say("stdout", ...args);
  const err = (...args) => say("stderr", ...args);
  const group = (...args) => ((args.length ? out(...args) : undefined), void depth++);
  Object.assign(console, {
    log: out, info: out, debug: out, warn: err, error: err, group, groupCollapsed: group,
    groupEnd: () => void (depth = Math.max(0, depth - 1)),
    dir: (value, options) => out(inspect(value, options)),
    dirxml: out,
    trace: (...args) => err(new Error(format(...args)).stack.replace(/^Error/, "Trace")),
    assert: (held, ...args) => held || err("Assertion failed", ...args),
    table: (value) => out(inspect(value, { depth: 2 })),
  });
}

const shortened = (text) => {
  if (text.length <= LONGEST_TEXT) return text;
  const half = LONGEST_TEXT / 2;
  const left = text.length - LONGEST_TEXT;
  return `${text.slice(0, half)}\n[smokebox: ${left} characters left out here]\n${text.slice(-half)}`;
};

const base64 = (value) => value instanceof Uint8Array ? Buffer.from(value).toString("base64") : value;

function fitted(bundle) {
  const found = {};
  let total = 0;
  for (const [mime, value] of Object.entries(bundle)) {
    const plain = base64(value);
    let text;
    try {
      text = JSON.stringify(plain);
    } catch {
      continue;
    }
    if (text === undefined) continue;
    total += text.length;
    if (total > LARGEST) {
      found["text/plain"] = `${found["text/plain"] ?? ""}\n[smokebox: ${mime} is too large to be shown]`;
      break;
    }
    found[mime] = plain;
  }
  return found;
}

const isPlain = (value) => {
  if (Array.isArray(value)) return true;
  const parent = value !== null && typeof value === "object" && Object.getPrototypeOf(value);
  return parent === Object.prototype || parent === null;
};

// A bundle, or the promise of one where the value takes its time.
function bundled(value) {
  if (value !== null && typeof value === "object" && typeof value[DISPLAY] === "function") {
    const given = value[DISPLAY]();
    return given instanceof Promise ? given.then(fitted) : fitted(given);
  }
  const plain = { "text/plain": shortened(inspect(value, { depth: 4, maxStringLength: LONGEST_TEXT })) };
  if (isPlain(value)) plain["application/json"] = value;
  return fitted(plain);
}

// Also what Deno's own notebooks take: a bundle as it is, with `raw`.
function display(value, options) {
  const show = (data) => {
    flush();
    send("result", { data });
  };
  const data = options?.raw ? fitted(value) : bundled(value);
  if (!(data instanceof Promise)) return show(data);
  showing.push(data.then(show));
}

const session = new inspector.Session();
session.connect();
const post = (method, fields) =>
  new Promise((done, fail) => session.post(method, fields, (error, got) => (error ? fail(error) : done(got))));

// From the inspector's description of a value to the value itself, which is of this very heap.
let taken;
const KEEP = Symbol("kept");
Object.defineProperty(globalThis, KEEP, { value: (value) => void (taken = value) });
let keeper = null;

async function valueOf(told) {
  if (told.type === "undefined") return undefined;
  if (told.subtype === "null") return null;
  if (!told.objectId && told.unserializableValue === undefined) return told.value;
  keeper ??= (await post("Runtime.evaluate", {
    expression: "globalThis[Object.getOwnPropertySymbols(globalThis).find(s => s.description === 'kept')]",
  })).result.objectId;
  const { objectId, unserializableValue } = told;
  await post("Runtime.callFunctionOn", {
    objectId: keeper,
    functionDeclaration: "function (value) { this(value) }",
    arguments: [objectId ? { objectId } : { unserializableValue }],
  });
  const value = taken;
  taken = undefined;
  if (objectId) await post("Runtime.releaseObject", { objectId });
  return value;
}

const located = (name) =>
  /^\.{0,2}\//.test(name) ? new URL(name, `file://${process.cwd()}/`).href : name;
const bring = async (name) => {
  const where = located(name);
  if (onDeno || where.includes(":") || module.isBuiltin?.(where)) return await import(where);
  return await import(new URL(`file://${module.createRequire(`${process.cwd()}/`).resolve(where)}`).href);
};

// What only modules may say, as scripts say it.
const IMPORT = /^[ \t]*import\s+(?:([\w$]+)\s*,?\s*)?(?:\*\s*as\s+([\w$]+)\s*|\{([^}]*)\}\s*)?(?:from\s*)?(["'])([^"'\n]+)\4(?:\s*with\s*\{[^}]*\})?[ \t]*;?/gm;
const EXPORT = /^([ \t]*)export\s+(?:default\s+)?(?=(?:async|function|class|const|let|var)\b)/gm;

function asScript(code) {
  const rewritten = code.replaceAll(IMPORT, (_, named, all, some, __, from) => {
    const bring = `await globalThis.__smokebox_import(${JSON.stringify(from)})`;
    const parts = (some ?? "").split(",").map((one) => one.trim()).filter(Boolean)
      .map((one) => one.replace(/^type\s+(?!as\b)/, "").replace(/\s+as\s+/, ": "));
    if (named) parts.unshift(`default: ${named}`);
    const lines = [parts.length ? `const {${parts.join(", ")}} = ${bring};` : ""];
    if (all) lines.push(`const ${all} = ${bring};`);
    if (!parts.length && !all) lines.push(`${bring};`);
    return lines.join(" ").trim() + "\n".repeat(_.split("\n").length - 1);
  });
  return rewritten.replaceAll(EXPORT, "$1");
}

function withoutTypes(code) {
  if (typeof module.stripTypeScriptTypes !== "function") {
    throw new Error("this program cannot run TypeScript: Deno, or Node from 22.13 on, can");
  }
  try {
    return module.stripTypeScriptTypes(code, { mode: "strip" });
  } catch {
    // Enums and the like, which become other code: their lines may move.
  }
  try {
    return module.stripTypeScriptTypes(code, { mode: "transform" });
  } catch (error) {
    const [first] = String(error.message).replace(/^SyntaxError: /, "").split("\n");
    throw new Thrown(new SyntaxError(first), Number(String(error.message).match(/:(\d+):\d+\)?$/m)?.[1] ?? 1));
  }
}

const interruption = () => Object.assign(new Error("the code was interrupted"), { name: "Interrupted" });

// A loop that never waits hears no signal: V8 ends it, a moment after the engine has noticed.
const evaluate = (code, timeout) =>
  post("Runtime.evaluate", {
    expression: `${code}\n//# sourceURL=cell-${count}`,
    replMode: true,
    awaitPromise: true,
    ...(timeout === null ? {} : { timeout: timeout * 1000 + LATER }),
  }).catch(() => {
    throw interruption();
  });

const isOfModules = (told) =>
  /^SyntaxError: (Cannot use import|Unexpected token 'export'|Unexpected strict mode reserved)/
    .test(told.exceptionDetails?.exception?.description ?? "");

async function run(code, timeout) {
  let source = typed ? withoutTypes(code) : code;
  if (!onDeno) source = source.replaceAll(/\bimport\s*\(/g, "globalThis.__smokebox_import(");
  let told = await evaluate(source, timeout);
  // Nothing of code that cannot be parsed was run.
  if (isOfModules(told)) told = await evaluate(asScript(source), timeout);
  if (told.exceptionDetails) {
    const details = told.exceptionDetails;
    const error = await valueOf(details.exception ?? { type: "undefined" });
    throw new Thrown(error, details.lineNumber + 1);
  }
  const value = await valueOf(told.result);
  await Promise.all(showing.splice(0));
  if (value === undefined) return null;
  globalThis._ = value;
  return await bundled(value);
}

class Thrown {
  constructor(error, line) {
    Object.assign(this, { error, line });
  }
}

// Up to where the kernel begins.
function stackOf(error) {
  const lines = String(error.stack ?? error).split("\n");
  const end = lines.findIndex((line) => /^\s+at .*(kernel\.mjs|node:inspector|deno_node|ext:core)/.test(line));
  return (end < 0 ? lines : lines.slice(0, end)).join("\n");
}

function described(thrown) {
  const error = thrown instanceof Thrown ? thrown.error : thrown;
  if (!(error instanceof Error)) {
    const text = shortened(inspect(error)).slice(0, LONGEST_MESSAGE);
    return { name: "Uncaught", message: text, traceback: `Uncaught ${text}\n`, line: null };
  }
  const stack = stackOf(error);
  const found = stack.match(new RegExp(`(?:cell-${count}|<anonymous>):(\\d+):`));
  const parse = error instanceof SyntaxError && thrown instanceof Thrown ? thrown.line : null;
  return {
    name: String(error.name ?? "Error"),
    message: String(error.message ?? "").slice(0, LONGEST_MESSAGE),
    traceback: `${stack.slice(-LONGEST_TRACEBACK)}\n`,
    line: found ? Number(found[1]) : parse,
  };
}

async function serve(request) {
  count += 1;
  id = request.id;
  const before = Object.fromEntries(Object.keys(request.env).map((name) => [name, process.env[name]]));
  Object.assign(process.env, request.env);
  running = true;
  flushed = 0;
  let result = null;
  let failed = null;
  try {
    const interrupted = new Promise((_, fail) => {
      interrupt = () => fail(interruption());
    });
    result = await Promise.race([run(request.code, request.timeout), interrupted]);
  } catch (error) {
    failed = described(error);
  }
  interrupt = null;
  flush();
  if (result) send("result", { data: result, main: true });
  if (failed) send("error", failed);
  for (const [name, value] of Object.entries(before)) {
    if (value === undefined) delete process.env[name];
    else process.env[name] = value;
  }
  running = false;
  send("end", { count });
}

const complain = (error) => {
  const text = error instanceof Error ? stackOf(error) : inspect(error);
  write("stderr", `Uncaught (in the background) ${text}\n`);
};

function prepare() {
  Object.assign(globalThis, { display, require: module.createRequire(`${process.cwd()}/`) });
  Object.defineProperty(globalThis, "__smokebox_import", { value: bring });
  process.on("SIGINT", () => interrupt?.());
  // As sys.exit() is to Python: the end of the code. Deno's own would fail within the inspector.
  const exit = (code = 0) => {
    throw Object.assign(new Error(String(code)), { name: "Exit" });
  };
  process.exit = exit;
  if (onDeno) Deno.exit = exit;
  if (!onDeno) {
    process.on("uncaughtException", complain);
    process.on("unhandledRejection", complain);
  } else {
    const hear = (event) => (event.preventDefault(), complain(event.reason ?? event.error));
    globalThis.addEventListener("unhandledrejection", hear);
    globalThis.addEventListener("error", hear);
  }
  redirect();
}

if (typed) withoutTypes("");
prepare();
send("ready", {});
let rest = [];
for await (const data of fs.createReadStream("/proc/self/fd/3")) {
  let begin = 0;
  for (let end; (end = data.indexOf(10, begin)) >= 0; begin = end + 1) {
    rest.push(data.subarray(begin, end));
    const line = Buffer.concat(rest).toString();
    rest = [];
    await serve(JSON.parse(line));
  }
  if (begin < data.length) rest.push(data.subarray(begin));
}
