// Buttons that can't be used for a while, and fields that hold what can't be sent.

/** Whether a button does anything now. It keeps the focus when it doesn't: a `disabled` one would drop it, and whoever
 *  works by the keyboard would begin at the page's top again. So its listeners ask `isUsable`. */
export function setUsable(button, usable) {
  button.setAttribute("aria-disabled", String(!usable));
}

export function isUsable(button) {
  return button.getAttribute("aria-disabled") !== "true";
}

/** Call `act` for each click while the button is usable. */
export function onPress(button, act) {
  button.addEventListener("click", () => isUsable(button) && act());
}

/** Whether one of `fields` holds what can't be sent: then it is shown, wherever it is folded away, and says why. A text
 *  of spaces is none. */
export function complain(fields) {
  for (const field of fields) {
    field.setCustomValidity(field.type === "number" || field.value.trim() ? "" : "Write something here first.");
    field.addEventListener("input", () => field.setCustomValidity(""), { once: true });
  }
  const wrong = fields.find((field) => !field.checkValidity());
  if (!wrong) return false;
  const folded = wrong.closest("details");
  if (folded) folded.open = true;
  wrong.reportValidity();
  return true;
}
