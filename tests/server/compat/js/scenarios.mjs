// Scenarios with the unmodified client of OpenAI's Agents SDK for JavaScript:
// `node scenarios.mjs URL`, with CLOUDFLARE_SANDBOX_API_KEY and BUCKET set.

import assert from 'node:assert/strict';
import { Runner, Usage } from '@openai/agents';
import { Manifest, SandboxAgent, dir, file, filesystem, shell } from '@openai/agents/sandbox';
import {
  CloudflareBucketMountStrategy,
  CloudflareSandboxClient,
} from '@openai/agents-extensions/sandbox/cloudflare';

const workerUrl = process.argv[2];
const apiKey = process.env.CLOUDFLARE_SANDBOX_API_KEY;
const binary = Uint8Array.from({ length: 25_600 }, (_, index) => index % 256);

const manifest = () =>
  new Manifest({
    environment: { WORD: 'exported' },
    entries: {
      'notes.txt': file({ content: 'from the manifest\n' }),
      src: dir({ children: { 'main.py': file({ content: 'print(6 * 7)\n' }) } }),
    },
  });

async function withSandbox(work, options = {}) {
  const client = new CloudflareSandboxClient({ workerUrl, apiKey, ...options });
  const session = await client.create(manifest());
  try {
    await work(session, client);
  } finally {
    await session.close();
  }
  assert.equal(await session.running(), false);
}

async function commandsReadFilesOfTheManifest() {
  await withSandbox(async (session) => {
    const cmd = 'cat notes.txt; python3 src/main.py; echo $WORD; echo ä€😀 >&2; exit 3';
    const output = await session.execCommand({ cmd });
    assert.match(output, /exited with code 3/);
    assert.match(output, /from the manifest\n42\nexported\nä€😀/);
  });
}

async function outputNeverSplitsACharacter() {
  await withSandbox(async (session) => {
    const cmd = `python3 -c "print('ä€😀' * 200000, end='')" | tee copy; cmp copy copy`;
    const output = await session.execCommand({ cmd });
    assert.ok(!output.includes('\ufffd'));
    assert.ok(output.includes('ä€😀'.repeat(200_000)));
  });
}

async function timeoutIsAResult() {
  await withSandbox(
    async (session) => {
      const output = await session.execCommand({ cmd: 'printf partly; sleep 1919' });
      assert.match(output, /exited with code 124/);
      assert.match(output, /partly/);
    },
    { timeoutMs: 3000 },
  );
}

async function commandWithoutOutputOutlastsHeartbeats() {
  await withSandbox(async (session) => {
    // Longer than the interval of the heartbeat.
    const output = await session.execCommand({ cmd: 'sleep 6; echo late' });
    assert.match(output, /exited with code 0[^]*late/);
  });
}

async function filesHaveAnyContentAndName() {
  await withSandbox(async (session) => {
    for (const path of ['data.bin', 'new/dir/a#b?c+d%41 ä.bin']) {
      await session.materializeEntry({ path, entry: file({ content: binary }) });
      assert.deepEqual(await session.readFile({ path }), binary);
    }
    assert.equal(await session.pathExists('new/dir'), true);
    assert.equal(await session.pathExists('missing'), false);
    await assert.rejects(session.readFile({ path: 'missing' }), { name: /NotFound/ });
    const editor = session.createEditor();
    await editor.createFile({
      type: 'create_file',
      path: 'edited.txt',
      diff: '+first\n+second\n',
    });
    const text = new TextDecoder().decode(await session.readFile({ path: 'edited.txt' }));
    assert.equal(text.trimEnd(), 'first\nsecond');
  });
}

async function pythonPromptInATerminal() {
  await withSandbox(async (session) => {
    const started = await session.execCommand({ cmd: 'python3 -q', tty: true, yieldTimeMs: 1500 });
    const id = Number(/session ID (\d+)/.exec(started)[1]);
    let output = '';
    for (const chars of ["print('x' * 3 + str(6 * 7))\n", 'exit()\n']) {
      output += await session.writeStdin({ sessionId: id, chars, yieldTimeMs: 1500 });
    }
    assert.match(output, /xxx42/);
    const ended = await session.writeStdin({
      sessionId: id,
      chars: 'exit 5\n',
      yieldTimeMs: 10_000,
    });
    assert.match(ended, /exited with code 5/);
  });
}

async function workspaceIsCopiedToAnotherSandbox() {
  let archive;
  await withSandbox(async (session) => {
    await session.execCommand({ cmd: 'mkdir new; echo kept > new/kept; ln -s kept new/link' });
    archive = await session.persistWorkspace();
  });
  await withSandbox(async (session) => {
    for (let round = 0; round < 2; round += 1) {
      await session.hydrateWorkspace(archive);
      assert.match(await session.execCommand({ cmd: 'cat new/link notes.txt' }), /kept\nfrom the/);
    }
  });
}

async function existingSandboxIsResumed() {
  await withSandbox(async (session, client) => {
    await session.execCommand({ cmd: 'echo kept > kept' });
    const again = await client.resume(session.state);
    assert.match(await again.execCommand({ cmd: 'cat kept' }), /kept/);
  });
}

async function bucketIsMounted() {
  const bucket = JSON.parse(process.env.BUCKET);
  const entry = {
    type: 's3_mount',
    bucket: bucket.bucket,
    endpointUrl: bucket.endpoint,
    accessKeyId: bucket.access_key,
    secretAccessKey: bucket.secret_key,
    prefix: 'from-js',
    readOnly: false,
    mountStrategy: new CloudflareBucketMountStrategy(),
  };
  await withSandbox(async (session) => {
    await session.materializeEntry({ path: 'data', entry });
    const cmd = 'echo kept > data/f; cat data/f; grep -c /data /proc/mounts';
    assert.match(await session.execCommand({ cmd }), /kept\n1/);
    await session.unmountBucket('/workspace/data');
    const mount = session.mountBucket({ bucket: 'b-b', mountPath: '/workspace/b', options: {} });
    await assert.rejects(mount, (error) => JSON.stringify(error).includes('no credentials'));
  });
  const credentials = { accessKeyId: bucket.access_key, secretAccessKey: bucket.secret_key };
  const mounts = [
    {
      bucket: bucket.bucket,
      mountPath: '/workspace/data',
      options: { endpoint: bucket.endpoint, prefix: 'from-js', credentials },
    },
  ];
  await withSandbox(
    async (session) => {
      assert.match(await session.execCommand({ cmd: 'cat data/f' }), /kept/);
    },
    { mounts },
  );
}

async function agentUsesTheSandbox() {
  const inputs = [];
  const turns = [
    {
      type: 'function_call',
      callId: 'one',
      name: 'exec_command',
      status: 'completed',
      arguments: JSON.stringify({ cmd: 'python3 src/main.py; cat notes.txt' }),
    },
    {
      type: 'message',
      role: 'assistant',
      status: 'completed',
      content: [{ type: 'output_text', text: 'It is 42.' }],
    },
  ];
  const model = {
    async getResponse(request) {
      inputs.push(JSON.stringify(request.input));
      return { output: [turns.shift()], usage: new Usage() };
    },
    getStreamedResponse() {
      throw new Error('streaming is not implemented');
    },
  };
  const agent = new SandboxAgent({
    name: 'worker',
    model,
    instructions: 'Work.',
    defaultManifest: manifest(),
    capabilities: [shell(), filesystem()],
  });
  const runner = new Runner({ tracingDisabled: true });
  const client = new CloudflareSandboxClient({ workerUrl, apiKey });
  const result = await runner.run(agent, 'What does it print?', { sandbox: { client } });
  assert.equal(result.finalOutput, 'It is 42.');
  assert.match(inputs[1], /42\\+nfrom the manifest/);
}

// Concurrently: most of their time they wait.
await Promise.all(
  [
    commandsReadFilesOfTheManifest,
    outputNeverSplitsACharacter,
    timeoutIsAResult,
    commandWithoutOutputOutlastsHeartbeats,
    filesHaveAnyContentAndName,
    pythonPromptInATerminal,
    workspaceIsCopiedToAnotherSandbox,
    existingSandboxIsResumed,
    bucketIsMounted,
    agentUsesTheSandbox,
  ].map(async (scenario) => {
    try {
      await scenario();
    } catch (error) {
      console.error(`${scenario.name}:`, error);
      process.exitCode = 1;
    }
  }),
);
