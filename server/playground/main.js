// The page's parts, put together.

import { setKey } from "./api.js";
import { startChat } from "./chat.js";
import { lookAgain, startEngine } from "./engine.js";
import { startRace } from "./race.js";
import { startSlowReader } from "./slow.js";

const form = document.getElementById("key-form");
const field = document.getElementById("key");
const note = document.getElementById("key-note");

if (document.documentElement.dataset.key === "needed") {
  note.textContent = "This server asks for a key.";
  field.focus();
} else {
  form.hidden = true;
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(field.value);
  note.textContent = field.value ? "The key is used. A reload forgets it." : "No key is used.";
  lookAgain();
});

startChat();
startRace();
startSlowReader();
startEngine();
