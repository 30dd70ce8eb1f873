// The page's parts, put together.

import { sentence } from "./announce.js";
import { askJson, Refused, setKey } from "./api.js";
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

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  const given = field.value;
  try {
    setKey(given);
  } catch {
    note.textContent = "This can't be a key: it holds a character that no request can carry.";
    return;
  }
  note.textContent = given.trim() ? "Trying the key." : "No key is used.";
  lookAgain();
  if (!given.trim()) return;
  const verdict = await triedKey();
  if (field.value === given) note.textContent = verdict;
});

async function triedKey() {
  try {
    await askJson("v1/models");
    return "The key is good. A reload forgets it.";
  } catch (error) {
    return error instanceof Refused ? sentence(error.message) : `${error.message} The key is not tried yet.`;
  }
}

startChat();
startRace();
startSlowReader();
startEngine();
