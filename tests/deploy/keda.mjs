// Validates the ScaledObject on stdin (as JSON) by KEDA's own schema, as npm's @kubernetes-models/keda has it.
import { readFileSync } from "node:fs";
import { ScaledObject } from "@kubernetes-models/keda/keda.sh/v1alpha1/ScaledObject";

new ScaledObject(JSON.parse(readFileSync(0, "utf8"))).validate();
