"""`make demo`: from `kubectl apply` to an answer, each tenant behind its own boundary. Leaves the cluster running."""

from __future__ import annotations

import difflib
import sys
import time

from cluster.errors import ClusterError
from stack import install, promises
from stack.install import Stack
from stack.kube import StackError
from stack.traffic import Steady, together

BOLD, DIM, GREEN, RED, PLAIN = "\033[1m", "\033[2m", "\033[32m", "\033[31m", "\033[0m"


class Demo:
    """The chapters, in order; a chapter that does not show what it must makes the demo fail."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.failed: list[str] = []

    def title(self, text: str) -> None:
        print(f"\n{BOLD}== {text}{PLAIN}", flush=True)

    def check(self, what: str, holds: bool, seen: str = "") -> None:
        mark = f"{GREEN}ok{PLAIN}" if holds else f"{RED}NOT SO{PLAIN}"
        print(f"   {mark}: {what}{f'  {DIM}{seen}{PLAIN}' if seen else ''}", flush=True)
        if not holds:
            self.failed.append(what)

    def tenants(self) -> None:
        self.title("Tenants of every tier (kubectl get tenants)")
        print(self.stack.kube.run("get", "tenants"))

    def answers(self) -> None:
        self.title("One answer per tier, through the openai package")
        for tenant, model, question in [
            ("birch", "chat", "Which book should I read next?"),
            ("cedar", "chat", "What is a derailleur?"),
            ("maple", "tone", "Where is my parcel?"),
            ("oak", "chat", "What is the capital of France?"),
        ]:
            answer = self.stack.client(tenant).ask(model, question, max_tokens=40)
            print(f"   {tenant}/{model} [{answer.served}]: {answer.text.strip()!r}")
            self.check(f"{tenant} is served", answer.status == 200, answer.message)
        print("   cedar/chat, streamed: ", end="", flush=True)
        pieces = 0
        for piece in self.stack.client("cedar").stream("chat", "Name two parts of a bicycle.", max_tokens=40):
            print(piece, end="", flush=True)
            pieces += 1
        print()
        self.check("the stream came in pieces", pieces > 3, f"{pieces} pieces")
        refusal = self.stack.client("yew").ask("chat", "hello")
        self.check(
            "yew (Regulated) is Stalled, not served on less", refusal.status in (404, 503), refusal.message
        )

    def mixed(self) -> None:
        self.title("Two adapters and the base in one mixed batch")
        maple = self.stack.client("maple")
        tone, triage, base = together(
            lambda: maple.ask("tone", "Where is my parcel?"),
            lambda: maple.ask("triage", "Where is my parcel?"),
            lambda: maple.ask("chat", "Where is my parcel?"),
        )
        for name, answer in (("tone", tone), ("triage", triage), ("chat", base)):
            print(f"   {name:7s} [{answer.served}]: {answer.text.strip()!r}")
        self.check("`tone` speaks like a pirate", "Ahoy" in tone.text)
        self.check("`triage` answers with JSON", '"topic"' in triage.text)
        self.check("the base does neither", "Ahoy" not in base.text and '"topic"' not in base.text)

    def foreign(self) -> None:
        self.title("The same key, refused on another tenant's model")
        answer = self.stack.client("cedar").ask("tone", "Where is my parcel?")
        unknown = self.stack.client("cedar").ask("no-such-model", "Where is my parcel?")
        self.check(
            "404, word for word as for a model that does not exist",
            (answer.status, answer.message.replace("tone", "X"))
            == (404, unknown.message.replace("no-such-model", "X")),
            f"{answer.status} {answer.message}",
        )

    def flood(self) -> None:
        self.title("A flood is shed, the neighbour is served")
        result = promises.flood(self.stack)
        print(f"   birch sent {result.sent}: {dict(result.outcomes)}; Retry-After {result.retry_after} s")
        print(
            f"   cedar meanwhile: {result.neighbour_ok}/{result.neighbour_sent} served, "
            f"p50 {result.neighbour_p50:.2f} s"
        )
        self.check("birch gets 429 with Retry-After", result.shed > 0 and result.retry_after is not None)
        self.check("every request of cedar is served", result.neighbour_ok == result.neighbour_sent)

    def promotion(self) -> None:
        self.title("Promotion is a one-line change, under traffic")
        maple = self.stack.client("maple")
        before, after = self.stack.adapter_text("tone"), self.stack.adapter_text("tone", stable="1.1.0")
        lines = difflib.unified_diff(
            before.splitlines(), after.splitlines(), "tone.yaml", "tone.yaml", lineterm="", n=1
        )
        print("\n".join(f"   {line}" for line in lines))
        with Steady(lambda: maple.ask("tone", "Where is my parcel?", max_tokens=6)) as traffic:
            promises.answered(traffic, 4)
            seconds = promises.promote(self.stack, "tone", "1.1.0")
            served = promises.served_after(self.stack, "maple", "tone")
        print(f"   promoted in {seconds:.1f} s; served meanwhile: {dict(traffic.served)}")
        answer = maple.ask("tone", "Where is my parcel?")
        print(f"   now [{answer.served}]: {answer.text.strip()!r}")
        self.check("the new digest answers", "--1.1.0-" in served, served)
        self.check("it is the formal one", "Dear customer" in answer.text)
        self.check(
            "0 failed requests",
            not traffic.failures,
            f"{len(traffic.answers)} sent; {dict(traffic.outcomes)}",
        )
        self.check("nothing but the two versions answered", promises.only_versions(traffic, "1.0.0", "1.1.0"))

    def node(self) -> None:
        self.title("The dedicated node refuses a foreign pod")
        for what, refused, words in promises.foreign_pods(self.stack):
            self.check(what, refused, words)

    def network(self) -> None:
        self.title("A probe from the Enterprise namespace is refused by policy")
        for what, refused, words in promises.network_probe(self.stack):
            self.check(what, refused, words)

    def next_steps(self) -> None:
        self.title("What to try next")
        stack = self.stack
        print(f"""   export KUBECONFIG={stack.kube.kubeconfig}
   {stack.kube.kubectl} get tenants,adapterpools,adapters -A
   .venv/bin/tenantry why maple                      # why is it where it is
   .venv/bin/tenantry keys mint birch                # a key for a tenant: hash to Git, key to its owner
   .venv/bin/tenantry cost --tenants examples/cost/tenants.yaml --fleet examples/cost/fleet.yaml
   curl -s {stack.url}/v1/models -H 'Authorization: Bearer {stack.keys["maple"]}'
   make demo-down                                    # removes all of it""")

    def run(self) -> int:
        self.tenants()
        for chapter in (
            self.answers,
            self.mixed,
            self.foreign,
            self.flood,
            self.promotion,
            self.node,
            self.network,
        ):
            chapter()
        self.next_steps()
        if self.failed:
            print(
                f"\n{RED}{len(self.failed)} of the demo's promises did not hold: {'; '.join(self.failed)}{PLAIN}"
            )
            return 1
        print(f"\n{GREEN}demo: every promise held{PLAIN}")
        return 0


def main() -> int:
    start = time.monotonic()
    try:
        stack = install.up()
        code = Demo(stack).run()
    except (ClusterError, StackError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"({time.monotonic() - start:.0f} s)")
    return code


if __name__ == "__main__":
    sys.exit(main())
