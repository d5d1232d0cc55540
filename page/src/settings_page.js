// The dialog of settings.

import { $ } from "./dom.js";
import { closeSidebar } from "./panes.js";
import { set, settings } from "./settings.js";
import * as store from "./store.js";
import * as transfer from "./transfer.js";

export function begin({ keyChanged, themeChanged, imported, emptied }) {
  const dialog = $("settings");
  $("open-settings").addEventListener("click", () => {
    closeSidebar();
    showStorage();
    dialog.showModal();
  });
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close()); // beside it
  for (const id of ["system", "tools", "theme", "temperature"]) {
    $(id).value = settings[id];
    $(id).addEventListener("input", () => {
      set(id, id === "temperature" ? Number($(id).value) : $(id).value);
      if (id === "theme") showTheme(themeChanged);
    });
  }
  showTheme();
  $("key").value = settings.key;
  $("key").addEventListener("change", () => {
    set("key", $("key").value.trim());
    keyChanged();
  });
  $("export").addEventListener("click", async () => say(counted(await transfer.save(), "exported")));
  $("import").addEventListener("click", () => $("import-file").click());
  $("import-file").addEventListener("change", async () => {
    const [file] = $("import-file").files;
    if (!file) return;
    try {
      say(counted(await transfer.open(file), "imported"));
      imported();
    } catch (error) {
      say(error.message);
    }
    $("import-file").value = "";
  });
  $("delete-all").addEventListener("click", async () => {
    if (!confirm("Delete all conversations? This cannot be undone.")) return;
    for (const one of store.list()) await store.remove(one);
    say("All conversations were deleted.");
    emptied();
  });
}

const counted = (n, what) => `${n} ${n === 1 ? "conversation was" : "conversations were"} ${what}.`;

function say(text) {
  $("storage").textContent = text;
}

function showStorage() {
  const n = store.conversations.size;
  say(`${n} ${n === 1 ? "conversation is" : "conversations are"} stored, in this browser only.`);
}

function showTheme(then) {
  if (settings.theme) document.documentElement.dataset.theme = settings.theme;
  else delete document.documentElement.dataset.theme;
  then?.();
}

// The field is where it is needed.
export function askForKey(isNeeded) {
  $(isNeeded ? "key-place" : "key-home").append($("key-field"));
  if (isNeeded) $("key").focus();
}
