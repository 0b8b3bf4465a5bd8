// The kernel of JavaScript and TypeScript contexts, which runs inside the sandbox on Deno or Node.
// It reads requests from descriptor 3 and writes frames to descriptor 4, one per line; see
// wire.py. Top-level names of the code stay defined, as in a REPL.

import fs from "node:fs";
import inspector from "node:inspector";
import module from "node:module";
import process from "node:process";
import { inspect, format } from "node:util";

const MAX_UNSENT = 1 << 15;
const FLUSH_MS = 4;
const TIMEOUT_MARGIN_MS = 100;
const MAX_SIZE = 16 << 20;
const MAX_TEXT = 1 << 20;
const MAX_MESSAGE = 1 << 14;
const MAX_TRACEBACK = 1 << 17;
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
let displaying = [];

// A lone surrogate cannot be encoded in UTF-8.
const wellFormed = (_, value) => (typeof value === "string" ? value.toWellFormed() : value);

function send(type, fields) {
  const line = Buffer.from(JSON.stringify({ type, id, ...fields }, wellFormed) + "\n");
  for (let at = 0; at < line.length; ) at += fs.writeSync(frames, line, at);
}

// Output of the code. Sent immediately after a pause: code that never awaits blocks timers.
function write(stream, data) {
  const last = written.at(-1);
  if (last?.stream === stream) last.data += data;
  else written.push({ stream, data });
  size += data.length;
  if (running && (size >= MAX_UNSENT || Date.now() - flushed > FLUSH_MS)) flush();
  else timer ??= setTimeout(flush, FLUSH_MS);
}

function flush() {
  clearTimeout(timer);
  timer = null;
  if (!running) {
    // Kept for the next execution, up to a limit.
    while (size > 2 * MAX_UNSENT) size -= written.shift().data.length;
    return;
  }
  flushed = Date.now();
  for (const { stream, data } of written) send("output", { stream, data });
  written = [];
  size = 0;
}

function writer(stream) {
  const decoder = new TextDecoder();
  return (data) => write(stream, typeof data === "string" ? data : decoder.decode(data, { stream: true }));
}

function redirect() {
  for (const name of ["stdout", "stderr"]) {
    const take = writer(name);
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
  const print = (stream, ...args) => {
    const text = format(...args);
    write(stream, (depth ? text.replaceAll(/^/gm, "  ".repeat(depth)) : text) + "\n");
  };
  const out = (...args) => print("stdout", ...args);
  const err = (...args) => print("stderr", ...args);
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

const shorten = (text) => {
  if (text.length <= MAX_TEXT) return text;
  const half = MAX_TEXT / 2;
  const left = text.length - MAX_TEXT;
  return `${text.slice(0, half)}\n[smokebox: ${left} characters left out here]\n${text.slice(-half)}`;
};

const base64 = (value) => value instanceof Uint8Array ? Buffer.from(value).toString("base64") : value;

function limited(bundle) {
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
    if (total > MAX_SIZE) {
      found["text/plain"] = `${found["text/plain"] ?? ""}\n[smokebox: ${mime} is too large to display]`;
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

// Returns a bundle, or a promise of one if the value creates it asynchronously.
function bundleOf(value) {
  if (value !== null && typeof value === "object" && typeof value[DISPLAY] === "function") {
    const bundle = value[DISPLAY]();
    return bundle instanceof Promise ? bundle.then(limited) : limited(bundle);
  }
  const plain = { "text/plain": shorten(inspect(value, { depth: 4, maxStringLength: MAX_TEXT })) };
  if (isPlain(value)) plain["application/json"] = value;
  return limited(plain);
}

// With `raw`, the value is a bundle, as in Deno's notebooks.
function display(value, options) {
  const show = (data) => {
    flush();
    send("result", { data });
  };
  const data = options?.raw ? limited(value) : bundleOf(value);
  if (!(data instanceof Promise)) return show(data);
  displaying.push(data.then(show));
}

const session = new inspector.Session();
session.connect();
const post = (method, fields) =>
  new Promise((done, fail) => session.post(method, fields, (error, got) => (error ? fail(error) : done(got))));

// The inspector returns a description of a value; these fetch the value itself, which is in this
// heap.
let kept;
const KEEP = Symbol("kept");
Object.defineProperty(globalThis, KEEP, { value: (value) => void (kept = value) });
let keepId = null;

async function valueOf(remote) {
  if (remote.type === "undefined") return undefined;
  if (remote.subtype === "null") return null;
  if (!remote.objectId && remote.unserializableValue === undefined) return remote.value;
  keepId ??= (await post("Runtime.evaluate", {
    expression: "globalThis[Object.getOwnPropertySymbols(globalThis).find(s => s.description === 'kept')]",
  })).result.objectId;
  const { objectId, unserializableValue } = remote;
  await post("Runtime.callFunctionOn", {
    objectId: keepId,
    functionDeclaration: "function (value) { this(value) }",
    arguments: [objectId ? { objectId } : { unserializableValue }],
  });
  const value = kept;
  kept = undefined;
  if (objectId) await post("Runtime.releaseObject", { objectId });
  return value;
}

const resolveUrl = (name) =>
  /^\.{0,2}\//.test(name) ? new URL(name, `file://${process.cwd()}/`).href : name;
const importModule = async (name) => {
  const where = resolveUrl(name);
  if (onDeno || where.includes(":") || module.isBuiltin?.(where)) return await import(where);
  return await import(new URL(`file://${module.createRequire(`${process.cwd()}/`).resolve(where)}`).href);
};

// Rewrites import and export statements, which only modules may have.
const IMPORT = /^[ \t]*import\s+(?:([\w$]+)\s*,?\s*)?(?:\*\s*as\s+([\w$]+)\s*|\{([^}]*)\}\s*)?(?:from\s*)?(["'])([^"'\n]+)\4(?:\s*with\s*\{[^}]*\})?[ \t]*;?/gm;
const EXPORT = /^([ \t]*)export\s+(?:default\s+)?(?=(?:async|function|class|const|let|var)\b)/gm;

function asScript(code) {
  const rewritten = code.replaceAll(IMPORT, (_, named, all, some, __, from) => {
    const load = `await globalThis.__smokebox_import(${JSON.stringify(from)})`;
    const parts = (some ?? "").split(",").map((one) => one.trim()).filter(Boolean)
      .map((one) => one.replace(/^type\s+(?!as\b)/, "").replace(/\s+as\s+/, ": "));
    if (named) parts.unshift(`default: ${named}`);
    const lines = [parts.length ? `const {${parts.join(", ")}} = ${load};` : ""];
    if (all) lines.push(`const ${all} = ${load};`);
    if (!parts.length && !all) lines.push(`${load};`);
    return lines.join(" ").trim() + "\n".repeat(_.split("\n").length - 1);
  });
  return rewritten.replaceAll(EXPORT, "$1");
}

function withoutTypes(code) {
  if (typeof module.stripTypeScriptTypes !== "function") {
    throw new Error("this version of Node cannot run TypeScript: use Deno, or Node 22.13 or later");
  }
  try {
    return module.stripTypeScriptTypes(code, { mode: "strip" });
  } catch {
    // Enums and the like have to be transformed, which may change line numbers.
  }
  try {
    return module.stripTypeScriptTypes(code, { mode: "transform" });
  } catch (error) {
    const [first] = String(error.message).replace(/^SyntaxError: /, "").split("\n");
    throw new Thrown(new SyntaxError(first), Number(String(error.message).match(/:(\d+):\d+\)?$/m)?.[1] ?? 1));
  }
}

const interruption = () => Object.assign(new Error("the code was interrupted"), { name: "Interrupted" });

// A loop that never awaits receives no signal: V8 ends it, shortly after the engine timed out.
const evaluate = (code, timeout) =>
  post("Runtime.evaluate", {
    expression: `${code}\n//# sourceURL=cell-${count}`,
    replMode: true,
    awaitPromise: true,
    ...(timeout === null ? {} : { timeout: timeout * 1000 + TIMEOUT_MARGIN_MS }),
  }).catch(() => {
    throw interruption();
  });

const needsModule = (response) =>
  /^SyntaxError: (Cannot use import|Unexpected token 'export'|Unexpected strict mode reserved)/
    .test(response.exceptionDetails?.exception?.description ?? "");

async function run(code, timeout) {
  let source = typed ? withoutTypes(code) : code;
  if (!onDeno) source = source.replaceAll(/\bimport\s*\(/g, "globalThis.__smokebox_import(");
  let response = await evaluate(source, timeout);
  // Code that could not be parsed has not run.
  if (needsModule(response)) response = await evaluate(asScript(source), timeout);
  if (response.exceptionDetails) {
    const details = response.exceptionDetails;
    const error = await valueOf(details.exception ?? { type: "undefined" });
    throw new Thrown(error, details.lineNumber + 1);
  }
  const value = await valueOf(response.result);
  await Promise.all(displaying.splice(0));
  if (value === undefined) return null;
  globalThis._ = value;
  return await bundleOf(value);
}

class Thrown {
  constructor(error, line) {
    Object.assign(this, { error, line });
  }
}

// Returns the stack without the frames of the kernel.
function stackOf(error) {
  const lines = String(error.stack ?? error).split("\n");
  const end = lines.findIndex((line) => /^\s+at .*(kernel\.mjs|node:inspector|deno_node|ext:core)/.test(line));
  return (end < 0 ? lines : lines.slice(0, end)).join("\n");
}

function describe(thrown) {
  const error = thrown instanceof Thrown ? thrown.error : thrown;
  if (!(error instanceof Error)) {
    const text = shorten(inspect(error)).slice(0, MAX_MESSAGE);
    return { name: "Uncaught", message: text, traceback: `Uncaught ${text}\n`, line: null };
  }
  const stack = stackOf(error);
  const found = stack.match(new RegExp(`(?:cell-${count}|<anonymous>):(\\d+):`));
  const parse = error instanceof SyntaxError && thrown instanceof Thrown ? thrown.line : null;
  return {
    name: String(error.name ?? "Error"),
    message: String(error.message ?? "").slice(0, MAX_MESSAGE),
    traceback: `${stack.slice(-MAX_TRACEBACK)}\n`,
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
    failed = describe(error);
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

const reportUncaught = (error) => {
  const text = error instanceof Error ? stackOf(error) : inspect(error);
  write("stderr", `Uncaught (in the background) ${text}\n`);
};

function prepare() {
  Object.assign(globalThis, { display, require: module.createRequire(`${process.cwd()}/`) });
  Object.defineProperty(globalThis, "__smokebox_import", { value: importModule });
  process.on("SIGINT", () => interrupt?.());
  // Ends the code, as sys.exit() does in Python. Deno's own fails within the inspector.
  const exit = (code = 0) => {
    throw Object.assign(new Error(String(code)), { name: "Exit" });
  };
  process.exit = exit;
  if (onDeno) Deno.exit = exit;
  if (!onDeno) {
    process.on("uncaughtException", reportUncaught);
    process.on("unhandledRejection", reportUncaught);
  } else {
    const handle = (event) => (event.preventDefault(), reportUncaught(event.reason ?? event.error));
    globalThis.addEventListener("unhandledrejection", handle);
    globalThis.addEventListener("error", handle);
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
