// Idempotency keys: an operator looks one up, and may forget it.

import { clean, list, make, setHidden, setText } from "./dom.js";
import { confirmed, post, tell } from "./operate.js";

const byId = (id) => document.getElementById(id);

function asked(act) {
  const scope = byId("lookup-scope").value.trim();
  return {
    act,
    records: byId("lookup-records").value,
    scope: scope === "" ? null : scope,
    operation: byId("lookup-operation").value.trim(),
    key: byId("lookup-key").value.trim(),
  };
}

function line(name, value) {
  return make("div", "", [make("dt", "", [name]), make("dd", "", [clean(value, 300)])]);
}

function moment(seconds) {
  const at = new Date(Number(seconds) * 1000);
  return Number.isNaN(at.getTime()) ? "" : at.toISOString();
}

function show(record) {
  const found = byId("lookup-found");
  setHidden(byId("lookup-forget"), record === null);
  if (record === null) {
    found.replaceChildren(line("state", "There is no record of this key."));
    return;
  }
  const lines = [line("state", record.state)];
  if (record.status !== null) lines.push(line("status", record.status));
  if (record.body_bytes !== null) lines.push(line("answer", `${record.body_bytes} bytes`));
  if (!record.kept) lines.push(line("answer", "too large, not kept"));
  lines.push(line("created", moment(record.created_at)));
  if (record.lease_until !== null) lines.push(line("lease until", moment(record.lease_until)));
  lines.push(line("expires", moment(record.expires_at)), line("takeovers", record.takeovers));
  for (const event of list(record.events, 100)) {
    const what = `${event.type} of ${event.aggregate} ${event.aggregate_id}`;
    lines.push(line("event", `${what}: ${event.state} in ${event.outbox}, id ${event.id}`));
  }
  found.replaceChildren(...lines);
}

async function look() {
  try {
    show((await post("keys", asked("show"))).record ?? null);
  } catch (error) {
    tell(`Not looked up: ${error.message}`, "bad");
  }
}

async function forget() {
  const body = asked("forget");
  const text = "The next request with this key will be carried out. Its effect may happen twice.";
  if (!(await confirmed(`Forget this key of ${body.operation}?`, text, "Forget"))) return;
  try {
    tell((await post("keys", body)).done ?? "Done.");
    await look();
  } catch (error) {
    tell(`Not done: ${error.message}`, "bad");
  }
}

async function fill() {
  const names = list((await post("keys", { act: "list" })).records, 50);
  byId("lookup-records").replaceChildren(
    ...names.map((name) => make("option", "", [clean(name, 100)], { value: name })),
  );
  const none = names.length === 0;
  setText(byId("lookup-none"), none ? "This process keeps no keys." : "");
  setHidden(byId("lookup-none"), !none);
  setHidden(byId("lookup-form"), none);
}

/** The panel; hidden from who may not act. */
export function lookupPart() {
  const panel = byId("lookup");
  panel.addEventListener("toggle", () => {
    if (panel.open) fill().catch((error) => tell(error.message, "bad"));
  });
  byId("lookup-form").addEventListener("submit", (event) => {
    event.preventDefault();
    look();
  });
  byId("lookup-forget").addEventListener("click", forget);
  return {
    update(message) {
      setHidden(panel, (message.operator ?? null) === null);
    },
  };
}
