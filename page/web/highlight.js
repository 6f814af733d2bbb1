// A request that is lit everywhere, and the tip at the pointer. Read next: view.js.

let lit_request = null;  // its id: that under the pointer, or else the pinned one
let pinned_request = null;  // its id: that which was clicked last
let named_bands = [];  // of the lanes, by the tour
function light_request(id) {
  const lit = id ?? pinned_request;
  if (lit === lit_request) return;
  lit_request = lit;
  mark_lit();
  dirty = dirty || "cursor";
}
function pin_request(id) {
  pinned_request = id === pinned_request ? null : id;
  light_request(id);
  mark_lit();
  dirty = dirty || "cursor";
}
function mark_lit() {
  for (const element of document.querySelectorAll("[data-request]")) {
    const {request} = element.dataset;
    element.classList.toggle("lit", request === String(lit_request));
    if (element.matches("button"))
      element.setAttribute("aria-pressed", String(request === String(pinned_request)));
  }
}
function show_tip(text, x, y) {
  const tip = $("tip");
  tip.textContent = text;
  tip.hidden = false;
  const left = Math.min(x + 14, innerWidth - tip.offsetWidth - 8);
  const above = y + 22 + tip.offsetHeight > innerHeight;
  tip.style.left = `${Math.max(8, left)}px`;
  tip.style.top = `${above ? y - tip.offsetHeight - 12 : y + 18}px`;
}
function hide_tip() { $("tip").hidden = true; }
