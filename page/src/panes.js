// The panes at the sides: columns where there is room, drawers on small screens.

import { $, el, iconButton } from "./dom.js";
import { set, settings } from "./settings.js";

const isWide = matchMedia("(min-width: 70rem)"); // as in page.css
const isMedium = matchMedia("(min-width: 48rem)");
let opened = () => {};

export function begin({ cacheOpened }) {
  opened = cacheOpened;
  $("open-sidebar").addEventListener("click", () => showSidebar(!document.body.classList.contains("sidebar-open")));
  for (const id of ["close-sidebar", "shade"]) $(id).addEventListener("click", closeSidebar);
  $("toggle-cache").addEventListener("click", () => showCache(!document.body.classList.contains("cache-open"), true));
  $("close-cache").addEventListener("click", () => {
    showCache(false, true);
    $("toggle-cache").focus();
  });
  for (const pane of ["sidebar", "cache"]) {
    $(pane).addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || isWide.matches || (pane === "cache" && isMedium.matches)) return;
      event.stopPropagation();
      if (pane === "sidebar") closeSidebar();
      else $("close-cache").click();
    });
  }
  for (const query of [isWide, isMedium]) query.addEventListener("change", arrange);
  arrange();
}

function arrange() {
  showSidebar(false);
  showCache(isMedium.matches && settings.cacheIsOpen !== false);
}

function showSidebar(isOpen) {
  document.body.classList.toggle("sidebar-open", isOpen);
  $("open-sidebar").setAttribute("aria-expanded", isOpen);
  if (isOpen) $("new").focus();
  setInert();
}

export function closeSidebar() {
  if (!document.body.classList.contains("sidebar-open")) return;
  showSidebar(false);
  $("open-sidebar").focus();
}

function showCache(isOpen, isChosen = false) {
  document.body.classList.toggle("cache-open", isOpen);
  $("toggle-cache").setAttribute("aria-expanded", isOpen);
  if (isChosen && isMedium.matches) set("cacheIsOpen", isOpen);
  if (isChosen && isOpen && !isMedium.matches) $("close-cache").focus();
  setInert();
  if (isOpen) opened();
}

// A drawer covers the conversation.
function setInert() {
  const { classList } = document.body;
  const covered = (classList.contains("sidebar-open") && !isWide.matches) || (classList.contains("cache-open") && !isMedium.matches);
  document.querySelector("main").inert = covered;
}

let hiding = 0;

export function toast(text, name, action) {
  const target = $("toast");
  const hide = () => { target.hidden = true; };
  target.replaceChildren(text, " ", el("button", { type: "button", onclick: () => {
    hide();
    action();
  } }, name), iconButton("close", "Dismiss", hide));
  target.hidden = false;
  clearTimeout(hiding);
  hiding = setTimeout(hide, 10_000);
}
