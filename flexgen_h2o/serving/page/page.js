// The page of `flexgen-h2o serve`. Text of files and models is only ever set as textContent.

const SHOWN_ERRORS = 100;
const HEAD_BYTES = 1 << 20; // of a file that is read for its first lines
const LONGEST_WAIT = 15000; // ms until the next try to connect
const NOTICE_TIME = 8000; // ms
const HISTORY = 600; // seconds of the chart

const find = (id) => document.getElementById(id);
const number = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });
const count = new Intl.NumberFormat("en");
const status = { batches: [], files: [] };

// The server.

let key = sessionStorage.getItem("key");
let login = null; // one dialog for all requests that wait for the key

function askKey() {
  login ??= new Promise((resolve) => {
    const dialog = find("login");
    dialog.onclose = () => {
      key = find("key").value;
      find("key").value = "";
      sessionStorage.setItem("key", key);
      login = null;
      resolve();
    };
    dialog.showModal();
  });
  return login;
}

async function send(path, options = {}) {
  for (;;) {
    const used = key;
    const headers = { ...options.headers, ...(used && { Authorization: `Bearer ${used}` }) };
    const response = await fetch(path, { ...options, headers });
    if (response.ok) return response;
    const body = await response.json().catch(() => ({}));
    if (response.status !== 401) throw new Error(body.error?.message ?? `status ${response.status}`);
    if (used) tell(body.error?.message, true);
    if (used === key) await askKey();
  }
}

const post = (path, value) => send(path, {
  method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(value),
});

async function follow() {
  for (let wait = 500; ; wait = Math.min(2 * wait, LONGEST_WAIT)) {
    try {
      const reader = (await send("events")).body.getReader();
      const decoder = new TextDecoder();
      for (let text = ""; ;) {
        const { done, value } = await reader.read();
        if (done) break;
        const events = (text + decoder.decode(value, { stream: true })).split("\n\n");
        text = events.pop();
        for (const event of events.filter((each) => each.startsWith("data: "))) {
          update(JSON.parse(event.slice(6)));
          wait = 500;
        }
      }
    } catch (error) {
      console.warn(error);
    }
    status.tokens_per_second = null;
    find("state").textContent = "no connection to the server; trying again";
    await new Promise((resolve) => setTimeout(resolve, wait));
  }
}

// What the user does.

let forget = 0;

function tell(message, isProblem = false) {
  find("notice").textContent = isProblem ? "" : message;
  find("problem").textContent = isProblem ? message : "";
  clearTimeout(forget);
  if (!isProblem) forget = setTimeout(tell, NOTICE_TIME, "");
}

async function attempt(action) {
  try {
    await action();
  } catch (error) {
    tell(error.message, true);
  }
}

async function upload(files) {
  for (const file of files) {
    await attempt(async () => {
      tell(`Uploading ${file.name}`);
      const form = new FormData();
      form.append("purpose", "batch");
      form.append("file", file);
      await send("v1/files", { method: "POST", body: form });
      tell(`Uploaded ${file.name}`);
    });
  }
}

async function readLines(id) {
  const response = await send(`v1/files/${id}/content`,
    { headers: { Range: `bytes=0-${HEAD_BYTES - 1}` } });
  const lines = (await response.text()).split("\n");
  const size = Number(response.headers.get("Content-Range")?.split("/")[1] ?? 0);
  if (size > HEAD_BYTES) lines.pop(); // it is cut off
  return lines.filter((line) => line.trim());
}

async function startBatch(file) {
  let endpoint = null;
  try {
    endpoint = JSON.parse((await readLines(file.id))[0]).url;
  } catch { /* the server says what is wrong with the file */ }
  await post("v1/batches", {
    input_file_id: file.id, completion_window: "24h",
    endpoint: typeof endpoint === "string" ? endpoint : "/v1/chat/completions",
  });
  tell(`Started a batch of ${file.filename}`);
}

async function download(id) {
  const link = document.createElement("a");
  const path = `v1/files/${id}/content`;
  link.href = key ? URL.createObjectURL(await (await send(path)).blob()) : path;
  link.download = `${id}.jsonl`;
  link.click();
  if (key) setTimeout(() => URL.revokeObjectURL(link.href), 60000);
}

function failureText(line) {
  const { custom_id: id, error, response } = JSON.parse(line);
  return `${id ?? ""}: ${(error ?? response?.body?.error)?.message ?? "failed"}`;
}

async function showErrors(batch, list) {
  const lines = await readLines(batch.error_file_id);
  const texts = lines.slice(0, SHOWN_ERRORS).map(failureText);
  const rest = batch.request_counts.failed - texts.length;
  if (rest > 0) texts.push(`and ${count.format(rest)} more, in the file of errors`);
  setItems(list, texts);
  list.hidden = false;
  giveFocus(list);
}

// What is shown.

function giveFocus(element) {
  element.tabIndex = -1;
  element.focus();
}

function setItems(list, texts) {
  list.replaceChildren(...texts.map((text) => {
    const item = document.createElement("li");
    item.textContent = text;
    return item;
  }));
}

// Show records in a list. Elements stay, and with them the focus, while their records change.
function setRecords(name, records, create, show) {
  const list = find(name);
  const rows = new Map([...list.children].map((row) => [row.dataset.id, row]));
  records.forEach((record, place) => {
    let row = rows.get(record.id);
    rows.delete(record.id);
    if (!row) {
      row = find(`${name}-row`).content.firstElementChild.cloneNode(true);
      row.dataset.id = record.id;
      create(row, () => status[name].find(({ id }) => id === record.id));
    }
    show(row, record);
    if (list.children[place] !== row) list.insertBefore(row, list.children[place] ?? null);
  });
  for (const row of rows.values()) {
    if (row.contains(document.activeElement)) giveFocus(list);
    row.remove();
  }
  find(`no-${name}`).hidden = records.length > 0;
}

function onClick(row, name, action) {
  row.querySelector(`.${name}`).onclick = () => attempt(action);
}

function setText(row, name, text) {
  const element = row.querySelector(`.${name}`);
  if (element.textContent !== text) element.textContent = text;
}

const bytes = (value) => {
  const place = value < 1000 ? 0 : Math.min(4, Math.floor(Math.log10(value) / 3));
  return `${number.format(value / 1000 ** place)} ${["bytes", "KB", "MB", "GB", "TB"][place]}`;
};
const time = (value) => new Date(1000 * value).toLocaleTimeString();
const date = (value) => new Date(1000 * value).toLocaleString();
const percent = (value) => `${number.format(100 * value)} %`;

function duration(value) {
  const seconds = Math.round(value);
  if (seconds < 60) return `${seconds} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 60 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

function createFile(row, file) {
  onClick(row, "start", () => startBatch(file()));
  onClick(row, "delete", async () => {
    const { id, filename } = file();
    if (!confirm(`Delete ${filename}?`)) return;
    await send(`v1/files/${id}`, { method: "DELETE" });
    tell(`Deleted ${filename}`);
  });
}

function showFile(row, file) {
  setText(row, "name", file.filename || file.id);
  setText(row, "detail", `${bytes(file.bytes)}, ${date(file.created_at)}`);
}

function createBatch(row, batch) {
  const list = row.querySelector(".messages");
  onClick(row, "cancel", () => post(`v1/batches/${batch().id}/cancel`, {}));
  onClick(row, "results", () => download(batch().output_file_id));
  onClick(row, "errors", () => download(batch().error_file_id));
  onClick(row, "show", () => showErrors(batch(), list));
}

const batchName = (batch) => status.files.find(
  ({ id }) => id === batch.input_file_id)?.filename || batch.id;

function showBatch(row, batch) {
  const { total, completed, failed } = batch.request_counts;
  const state = batch.status.replace("_", " ");
  const badge = row.querySelector(".status");
  if (badge.dataset.status && badge.dataset.status !== batch.status) {
    tell(`${batchName(batch)}: ${state}`);
  }
  badge.dataset.status = batch.status;
  setText(row, "name", batchName(batch));
  setText(row, "status", state);
  setText(row, "detail", `${batch.id}, ${date(batch.created_at)}`);
  const bar = row.querySelector("progress");
  bar.hidden = !total;
  bar.value = total ? (completed + failed) / total : 0;
  bar.setAttribute("aria-label", `Progress of ${batchName(batch)}`);
  setText(row, "figures", [
    total && `${count.format(completed)} of ${count.format(total)} requests`,
    failed && `${count.format(failed)} failed`,
    batch.tokens_per_second != null && `${number.format(batch.tokens_per_second)} tokens/s`,
    batch.seconds_left != null && `about ${duration(batch.seconds_left)} left`,
  ].filter(Boolean).join(", "));
  for (const [name, isShown] of Object.entries({
    cancel: ["validating", "in_progress"].includes(batch.status), results: batch.output_file_id,
    show: batch.error_file_id, errors: batch.error_file_id,
  })) row.querySelector(`.${name}`).hidden = !isShown;
  if (document.activeElement.hidden && row.contains(document.activeElement)) giveFocus(row);
  const errors = batch.errors?.data ?? [];
  const list = row.querySelector(".messages");
  if (errors.length && list.hidden) {
    setItems(list, errors.map(({ line, message }) => (
      line == null || message.startsWith("line ") ? message : `line ${line}: ${message}`)));
    list.hidden = false;
  }
}

function showMachine() {
  const figures = Object.entries({
    "Tokens/s": number.format(status.tokens_per_second),
    "Running sequences": count.format(status.running),
    "Waiting sequences": count.format(status.waiting),
    "Generated tokens": count.format(status.generation_tokens),
    "Prompt tokens": count.format(status.prompt_tokens),
  }).concat(Object.entries(status.rates).map(([name, value]) => [name, percent(value)]));
  find("figures").replaceChildren(...figures.map(([name, value]) => {
    const [group, term, detail] = ["div", "dt", "dd"].map((tag) => document.createElement(tag));
    term.textContent = name;
    detail.textContent = value;
    group.append(term, detail);
    return group;
  }));
  find("tiers").tBodies[0].replaceChildren(...status.tiers.map((tier) => {
    const row = document.createElement("tr");
    const sizes = [tier.holds_bytes, tier.read_bytes, tier.written_bytes].map(bytes);
    for (const text of [tier.name, ...sizes]) {
      const cell = document.createElement(row.children.length ? "td" : "th");
      cell.textContent = text;
      row.append(cell);
    }
    return row;
  }));
}

function update(changes) {
  Object.assign(status, changes);
  find("model").textContent = status.model;
  document.title = `${status.model} – flexgen_h2o`;
  const state = status.error || { ok: "running", stopping: "stopping" }[status.state] || "error";
  if (find("state").textContent !== state) find("state").textContent = state;
  setRecords("files", status.files, createFile, showFile);
  setRecords("batches", status.batches, createBatch, showBatch);
  showMachine();
  if (changes.plan) setItems(find("plan"), status.plan);
}

// The chart.

const history = [[], []]; // seconds since 1970, tokens/s
let chart = null;

function drawChart() {
  const style = getComputedStyle(document.documentElement);
  const color = (name) => style.getPropertyValue(`--${name}`).trim();
  const axis = { stroke: color("quiet"), grid: { stroke: color("line"), width: 1 } };
  chart?.destroy();
  chart = new uPlot({
    width: find("chart").clientWidth, height: 160, legend: { show: false },
    cursor: { show: false },
    series: [{}, { stroke: color("accent"), width: 2, points: { show: false } }],
    axes: [{ ...axis, space: 90, values: (_, times) => times.map(time) }, { ...axis, size: 60 }],
    scales: { y: { range: (_, low, high) => [0, 1.1 * (high || 1)] } },
  }, history, find("chart"));
}

function extendChart() {
  history[0].push(Date.now() / 1000);
  history[1].push(status.tokens_per_second ?? null);
  if (history[0].length > HISTORY) history.forEach((column) => column.shift());
  chart.setData(history);
}

// Start.

const drop = find("drop");
find("upload").onchange = async ({ target }) => {
  await upload([...target.files]);
  target.value = "";
};
for (const kind of ["dragover", "dragleave", "drop"]) {
  drop.addEventListener(kind, (event) => {
    event.preventDefault();
    drop.classList.toggle("over", kind === "dragover");
    if (kind === "drop") upload([...event.dataTransfer.files]);
  });
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawChart);
new ResizeObserver(drawChart).observe(find("chart"));
drawChart();
setInterval(extendChart, 1000);
follow();
