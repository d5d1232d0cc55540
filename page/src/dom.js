// Makes and finds elements.

export const $ = (id) => document.getElementById(id);

// Properties, attributes (with a hyphen, or "role") and listeners (on...).
export function el(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (value === undefined) continue;
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (key === "icon") addIcon(made, value);
    else if (key.includes("-") || key === "role") made.setAttribute(key, value);
    else made[key] = value;
  }
  made.append(...children);
  return made;
}

// A button whose name is its tip; label: shown beside the icon.
export function iconButton(icon, name, onclick, label = "") {
  const names = label === name ? {} : { "aria-label": name, title: name };
  return el("button", { type: "button", className: label ? "" : "icon", icon, ...names, onclick }, label);
}

const PATHS = {
  plus: "M12 5v14M5 12h14",
  close: "M6 6l12 12M18 6L6 18",
  menu: "M4 7h16M4 12h16M4 17h16",
  settings: "M4 7h10M18 7h2M4 17h2M10 17h10M14 7a2 2 0 1 0 4 0 2 2 0 1 0-4 0M6 17a2 2 0 1 0 4 0 2 2 0 1 0-4 0",
  memory: "M4 6h16v12H4zM8 6v12M12 6v12M16 6v12",
  down: "M12 5v14M6 13l6 6 6-6",
  up: "M12 19V5M6 11l6-6 6 6",
  stop: "M7 7h10v10H7z",
  clip: "M20 11l-8.5 8.5a5 5 0 0 1-7-7L13 4a3.5 3.5 0 0 1 5 5l-8.500 8.500a2 2 0 0 1-3-3L14 7",
  copy: "M9 9h11v11H9zM5 15H4V4h11v1",
  check: "M5 13l4 4L19 7",
  again: "M20 11a8 8 0 1 0-2 6M20 5v6h-6",
  edit: "M4 20h4L20 8l-4-4L4 16zM14 6l4 4",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
  left: "M15 5l-7 7 7 7",
  right: "M9 5l7 7-7 7",
  save: "M12 4v11M7 10l5 5 5-5M5 20h14",
  open: "M12 16V5M7 10l5-5 5 5M5 20h14",
  play: "M8 5l11 7-11 7z",
};

export function addIcon(target, name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("aria-hidden", "true");
  const path = document.createElementNS(svg.namespaceURI, "path");
  path.setAttribute("d", PATHS[name]);
  svg.append(path);
  target.prepend(svg);
}

export function addIcons() {
  for (const target of document.querySelectorAll("[data-icon]")) addIcon(target, target.dataset.icon);
}

export const bytes = (n) =>
  n < 2 ** 20 ? `${(n / 2 ** 10).toFixed(0)} KiB` : `${(n / 2 ** 20).toFixed(1)} MiB`;

// The clipboard needs HTTPS or localhost; elsewhere an older command copies a selection.
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const box = el("textarea", { value: text, className: "unseen" });
    document.body.append(box);
    box.select();
    document.execCommand("copy");
    box.remove();
  }
}

export function copyButton(text) {
  const button = iconButton("copy", "Copy", async () => {
    await copy(text());
    button.firstChild.replaceWith(el("span", { className: "done", icon: "check" }));
    setTimeout(() => {
      button.firstChild.remove();
      addIcon(button, "copy");
    }, 1500);
  });
  return button;
}
